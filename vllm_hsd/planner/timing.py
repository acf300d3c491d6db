"""Costs of all candidates on this machine, from timed cascades in a real engine.

Every candidate drafts alone, verifies the smallest of the others at several lengths, and the
target verifies several lengths; each of these cascades generates text, and every turn and step
is timed. So the times are those of serving: caches as warm or cold as they are then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import trim_mean

from vllm_hsd.engine_runs import engine_environment
from vllm_hsd.planner.costs import Costs, TimeTable, prolonged
from vllm_hsd.planner.errors import PlannerError
from vllm_hsd.planner.profile import Candidate

# Lengths at which verification is timed, as far as the longest draft allows.
LENGTHS = (1, 2, 4, 7, 11, 15, 23, 31)
STEPS = 24
PASSES = 2
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

    def settings(self) -> list[dict[str, Any]]:
        """The cascades to time, once per batch size and pass."""
        lengths = [n for n in LENGTHS if n < self.max_tokens]
        smallest = np.argsort(self.sizes, kind="stable").tolist()
        cascades: list[tuple[list[int], list[int]]] = []
        for model in range(len(self.candidates)):
            cascades.append(([model], [min(4, self.max_tokens)]))
            others = [other for other in smallest if other != model]
            cascades += [([others[0], model], [n, n + 1]) for n in lengths if others]
        cascades += [(smallest[:1], [n]) for n in (*lengths, self.max_tokens)]
        return [
            {"levels": levels, "budgets": budgets, "batch": batch, "tokens": self.tokens(budgets)}
            for _ in range(PASSES)
            for batch in self.batch_sizes
            for levels, budgets in cascades
        ]

    def plain_settings(self) -> list[dict[str, Any]]:
        """The same without speculation."""
        return [
            {"levels": [], "budgets": [], "batch": batch, "tokens": self.tokens([1])}
            for _ in range(PASSES)
            for batch in self.batch_sizes
        ]

    @staticmethod
    def tokens(budgets: Sequence[int]) -> int:
        """Tokens to generate so that about STEPS steps are seen."""
        return STEPS * (2 + budgets[-1] // 3)

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
            levels = [
                {**candidate.level(), "num_tokens": self.max_tokens}
                for candidate in self.candidates
            ]
            engine["speculative_config"] = {
                "method": "hsd",
                "levels": levels,
                "num_speculative_tokens": self.max_tokens,
            }
        return {
            "engine": engine,
            "prompts": [{"prompt_token_ids": list(ids)} for ids in prompts],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "verifier": "hierarchical",
            "seed": self.seed,
            "clock": self.clock,
            "settings": self.settings() if speculative else self.plain_settings(),
        }


def measure_costs(
    machine: Machine,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    advance: Callable[[int], None] = lambda done: None,
) -> Costs:
    """Run the engines, one after the other, and make tables of what they took.

    Args:
        prompts: token ids of the texts to continue.
        folder: for the engines' log, and for what a finished engine recorded, which a later
            call takes up.
        advance: told how many settings are done, see `Machine.settings`.

    Raises:
        PlannerError: an engine failed; says why and where its log is.
    """
    before = len(machine.settings())
    recordings = []
    for name, speculative, done_before in (("cascades", True, 0), ("plain", False, before)):
        kept = folder / f"{name}.json"
        if not kept.exists():
            job = machine.job(speculative, prompts)
            found = run_engine(job, folder / "engine.log", lambda n, m=done_before: advance(m + n))
            unfinished = kept.with_suffix(".part")
            unfinished.write_text(json.dumps(found))
            unfinished.rename(kept)
        recordings.append(json.loads(kept.read_text()))
    return tables(machine, *recordings)


def run_engine(
    job: dict[str, Any], log: Path, advance: Callable[[int], None]
) -> list[dict[str, Any]]:
    """One engine process from start to end; returns its recordings, one per setting."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_hsd.planner.timing_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=engine_environment(),
        )
        with process:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.close()
            for line in process.stdout:
                answer = json.loads(line)
                if "error" in answer:
                    raise PlannerError(
                        f"vLLM could not run the models for timing: {answer['error']} (log: {log})."
                    )
                if "result" in answer:
                    return answer["result"]
                advance(answer["progress"])
    raise PlannerError(
        f"vLLM ended with status {process.returncode} while it was being timed; read {log}."
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
            raise PlannerError(
                f"no step of batch size {batch} was seen while timing: the prompts do not fit "
                f"beside each other, so lower --batch-sizes or raise max_num_batched_tokens."
            )
        xs = sorted(by_tokens)
        # The mean of the middle half: totals add up from means, and pauses must not count.
        means = [trim_mean(by_tokens[n], 0.25) for n in xs]
        # More tokens never take less time; what noise says otherwise is averaged out.
        means = isotonic_regression(means, weights=[len(by_tokens[n]) for n in xs]).x
        widths = [np.subtract(*np.quantile(by_tokens[n], (0.75, 0.25))) / 2 for n in xs]
        rows.append([round(max(prolonged(xs, means, n), 1e-6), 6) for n in grid])
        spread.append([round(float(np.interp(n, xs, widths)), 6) for n in grid])
    return TimeTable(batch_sizes=list(batch_sizes), tokens=grid, ms=rows, spread=spread)
