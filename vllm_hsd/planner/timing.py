"""Costs of all candidates on this machine, from timed cascades in a real engine.

Every candidate drafts alone, verifies the smallest of the others at several lengths, and the
target verifies several lengths; each of these cascades generates text, and every turn and step
is timed. So the times are those of serving: caches as warm or cold as they are then. A second
engine is timed without speculation, in turns with the first where memory allows: what slows the
machine down for a while then slows both, and their ratio, the speed-up, stays right.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression

from vllm_hsd.engine_process import JsonLinesProcess
from vllm_hsd.errors import UserError
from vllm_hsd.planner.costs import Costs, TimeTable, prolonged
from vllm_hsd.planner.profile import Candidate

# Lengths at which verification is timed, as far as the longest draft allows.
LENGTHS = (1, 2, 4, 7, 11, 15, 23, 31)
STEPS = 12
# Steps without speculation in every pass: a single number that all speed-ups depend on.
PLAIN_STEPS = 48
PASSES = 4
# In medians: a step that took longer was interrupted.
PAUSE = 2
# Token counts seen less often than this are left to interpolation.
SEEN = 3


@dataclass(frozen=True)
class Machine:
    """How the engines run.

    Attributes:
        target: path of the target.
        candidates: levels to load, as in a profile.
        sizes: parameters of each candidate, to choose the smallest.
        engine_args: arguments of `vllm.LLM` beside the model's.
        batch_sizes: requests per step.
        max_tokens: longest draft.
        clock: "wall", or "cpu" for the time that the engine's main thread really ran, which
            is the wall time of a quiet machine when models run on one CPU thread.
    """

    target: str
    candidates: Sequence[Candidate]
    sizes: Sequence[int]
    engine_args: dict[str, Any]
    batch_sizes: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    clock: str = "wall"

    def settings(self, number: int) -> list[dict[str, Any]]:
        """The cascades to time in one pass, the first being number 0, at every batch size."""
        lengths = [n for n in LENGTHS if n < self.max_tokens]
        smallest = np.argsort(self.sizes, kind="stable").tolist()
        cascades: list[tuple[list[int], list[int]]] = []
        for model in range(len(self.candidates)):
            cascades.append(([model], [min(4, self.max_tokens)]))
            others = [other for other in smallest if other != model]
            cascades += [([others[0], model], [n, n + 1]) for n in lengths if others]
        cascades += [(smallest[:1], [n]) for n in (*lengths, self.max_tokens)]
        return [
            {
                "levels": levels,
                "draft_lengths": draft_lengths,
                "batch": batch,
                # About STEPS steps of the target.
                "tokens": STEPS * (2 + draft_lengths[-1] // 3),
                "first_prompt": number * len(cascades) + index,
            }
            for batch in self.batch_sizes
            for index, (levels, draft_lengths) in enumerate(cascades)
        ]

    def plain_settings(self, number: int) -> list[dict[str, Any]]:
        """The same without speculation."""
        setting = {"levels": [], "draft_lengths": [], "tokens": PLAIN_STEPS, "first_prompt": number}
        return [{**setting, "batch": batch} for batch in self.batch_sizes]

    def job(self, speculative: bool, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The job of `timing_engine` with or without speculation."""
        engine = {
            "model": self.target,
            "max_num_seqs": max(self.batch_sizes),
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "seed": self.seed,
            **self.engine_args,
        }
        if speculative:
            # All candidates stand in one stack, in which every level needs room for a draft.
            room = max(self.max_tokens, len(self.candidates))
            levels = [{**candidate.level(), "num_tokens": room} for candidate in self.candidates]
            engine["speculative_config"] = {
                "method": "hsd",
                "levels": levels,
                "num_speculative_tokens": room,
            }
        return {
            "engine": engine,
            "prompts": [{"prompt_token_ids": list(ids)} for ids in prompts],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "clock": self.clock,
        }


def measure_costs(
    machine: Machine,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    advance: Callable[[int], None] = lambda done: None,
) -> Costs:
    """Run both engines and make tables of what they took.

    On a GPU, whose memory one engine fills, they run one after the other.

    Args:
        prompts: token ids of the texts to continue.
        folder: for the engines' log, and for what a finished pass recorded, which a later
            call takes up.
        advance: told how many of the `settings_in_all` are done.

    Raises:
        UserError: an engine failed; says why and where its log is.
    """
    order = [(name, number) for number in range(PASSES) for name in ("cascades", "plain")]
    together = not torch.cuda.is_available()
    if not together:
        order.sort()
    recorded: dict[str, list[dict[str, Any]]] = {"cascades": [], "plain": []}
    done = 0
    with contextlib.ExitStack() as running:
        engines: dict[str, Engine] = {}
        for name, number in order:
            speculative = name == "cascades"
            settings = (machine.settings if speculative else machine.plain_settings)(number)
            kept = folder / f"{name}-{number}.json"
            if not kept.exists():
                if name not in engines:
                    if not together:
                        running.pop_all().close()
                    engine = Engine(machine.job(speculative, prompts), folder / "engine.log")
                    engines[name] = running.enter_context(engine)
                found = engines[name].run(settings, lambda n, before=done: advance(before + n))
                unfinished = kept.with_suffix(".part")
                unfinished.write_text(json.dumps(found))
                unfinished.rename(kept)
            done += len(settings)
            advance(done)
            recorded[name] += json.loads(kept.read_text())
    return tables(machine, recorded["cascades"], recorded["plain"])


def settings_in_all(machine: Machine) -> int:
    """Settings that `measure_costs` runs."""
    return PASSES * (len(machine.settings(0)) + len(machine.plain_settings(0)))


class Engine:
    """An engine process that is timed; a context manager. It loads before its first settings.

    Args:
        job: see `Machine.job`.
        log: file that gets everything that the process prints.
    """

    def __init__(self, job: dict[str, Any], log: Path):
        self.log = log
        self.process = JsonLinesProcess("vllm_hsd.planner.timing_engine", log)
        self.process.send(job)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        # Whatever it still does after an error here is of no use.
        self.process.close(at_once=exception[0] is not None)

    def run(
        self, settings: Sequence[dict[str, Any]], advance: Callable[[int], None] = lambda done: None
    ) -> list[dict[str, Any]]:
        """Recordings, one per setting; `advance` is told how many are done.

        Raises:
            UserError: the engine failed; says why and where its log is.
        """
        self.process.send(settings)
        while (answer := self.process.receive()) is not None:
            if "error" in answer:
                raise UserError(
                    f"vLLM could not run the models for timing: {answer['error']} "
                    f"(log: {self.log})."
                )
            if "result" in answer:
                return answer["result"]
            advance(answer["progress"])
        raise UserError(
            f"vLLM ended with status {self.process.status()} while it was being timed; "
            f"read {self.log}."
        )


def tables(machine: Machine, cascades: list[dict[str, Any]], plain: list[dict[str, Any]]) -> Costs:
    """Tables by batch size and tokens from recordings."""
    turns = [turn for recording in cascades for turn in recording["turns"]]
    steps = [step for recording in cascades for step in recording["steps"]]
    longest = machine.max_tokens + 1
    forward = [
        _table(
            machine.batch_sizes,
            longest,
            ((t["batch"], t["tokens"], t["ms"]) for t in turns if t["level"] == model),
        )
        for model in range(len(machine.candidates))
    ]
    target = ((s["batch"], s["tokens"], s["ms"]) for s in steps)
    forward.append(_table(machine.batch_sizes, longest, target))
    overhead = {}
    for role, reach in (("draft", 1), ("verify", longest)):
        extra = (
            (t["batch"], t["tokens"], t["turn_ms"] - t["ms"]) for t in turns if t["role"] == role
        )
        samples = list(extra)
        if samples:
            overhead[role] = _table(machine.batch_sizes, reach, samples)
    alone = ((s["batch"], s["tokens"], s["ms"]) for r in plain for s in r["steps"])
    return Costs(forward=forward, overhead=overhead, plain=_table(machine.batch_sizes, 1, alone))


def _table(
    batch_sizes: Sequence[int], longest: int, samples: Iterable[tuple[int, int, float]]
) -> TimeTable:
    """Samples (batch, tokens of the whole batch, ms) as a table for 1..longest tokens each."""
    grid = [n for n in (1, *(length + 1 for length in LENGTHS)) if n < longest] + [longest]
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for batch, tokens, ms in samples:
        found[batch][round(tokens / batch)].append(ms)
    rows, spread = [], []
    for batch in batch_sizes:
        by_tokens = {n: ms for n, ms in found[batch].items() if len(ms) >= SEEN}
        if not by_tokens:
            raise UserError(
                f"no step of batch size {batch} was seen while timing: the prompts do not fit "
                f"beside each other, so lower --batch-sizes or raise max_num_batched_tokens."
            )
        xs = sorted(by_tokens)
        means = [_mean(by_tokens[n]) for n in xs]
        # More tokens never take less time; what noise says otherwise is averaged out.
        means = isotonic_regression(means, weights=[len(by_tokens[n]) for n in xs]).x
        widths = [np.subtract(*np.quantile(by_tokens[n], (0.75, 0.25))) / 2 for n in xs]
        rows.append([round(max(prolonged(xs, means, n), 1e-6), 6) for n in grid])
        spread.append([round(float(np.interp(n, xs, widths)), 6) for n in grid])
    return TimeTable(batch_sizes=list(batch_sizes), tokens=grid, ms=rows, spread=spread)


def _mean(samples: Sequence[float]) -> float:
    """The mean, since totals add up from means, without the pauses of the machine.

    A pause is a time of more than `PAUSE` medians; what is merely slow happens in use too.
    """
    values = np.array(samples)
    return float(values[values <= PAUSE * np.median(values)].mean())
