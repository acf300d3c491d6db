"""Latencies of all candidates on this machine, from timed cascades in a real engine.

Every candidate drafts alone, verifies the drafts of another one at several lengths, and the
target verifies several lengths; each of these cascades generates text, and every call and step
is timed. So the times are those of serving: caches as warm or cold as they are then. A second
engine is timed without speculation, alternating with the first where memory allows: what slows the
machine down for a while then slows both, and their ratio, the speed-up, stays right.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.checked_files import read_json, write_json
from vllm_hsd.config.sizes import MAX_BATCH_SIZE
from vllm_hsd.errors import UserError
from vllm_hsd.levels import LevelConfig
from vllm_hsd.tools.engine import EngineProcess
from vllm_hsd.tools.machine_load import MachineLoad
from vllm_hsd.tools.planner import recorder
from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable, interpolated
from vllm_hsd.tools.planner.task import Task

# Lengths at which verification is timed, up to the longest draft.
LENGTHS = (1, 2, 4, 7, 11, 15, 23, 31)
STEPS = 12
# Steps without speculation in every pass: a single number that all speed-ups depend on.
PLAIN_STEPS = 48
PASSES = 4
# In medians: a step that took longer was interrupted.
PAUSE = 2
# Token counts seen less often than this are left to interpolation.
SEEN = 3
# Standard errors by which a pass over more tokens has to be the faster one.
FALL = 3

Recording = dict[str, Any]
# A level of the engine, and numbers of those of its sources that draft; None for all.
Place = tuple[int, list[int] | None]


class Timing:
    """The engines that time a task's candidates, and what they run.

    Args:
        prompts: token ids of the texts to continue.
        vocabulary: number of token ids.
        directory: for the engines' log and what they need.
    """

    def __init__(
        self,
        task: Task,
        prompts: Sequence[Sequence[int]],
        vocabulary: int,
        directory: Path,
    ):
        self.task, self.prompts = task, [list(prompt) for prompt in prompts]
        self.vocabulary, self.directory = vocabulary, directory
        # A bigram model drafts as many tokens as are requested, for next to nothing.
        self.filler = str(directory / "filler.safetensors")
        self.drafter = len(task.candidates)
        self.levels, self.places = self._hosted()

    def _hosted(self) -> tuple[list[dict[str, Any]], dict[int, Place]]:
        """The engine's levels, and by candidate its place among them and its sources there.

        An engine has one lowest level: several candidates for it are sources of one.
        """
        every = self.task.candidates
        lowest = [candidate.level for candidate in every if candidate.level.only_lowest]
        sources: list[LevelConfig] = []
        for source in itertools.chain.from_iterable(level.drafters for level in lowest):
            if source not in sources:
                sources.append(source)
        levels: list[dict[str, Any]] = []
        places: dict[int, Place] = {}
        if len(lowest) > 1:
            keys = [source.model_dump(exclude_unset=True) for source in sources]
            levels.append({"sources": keys, "branches": 1})
        elif lowest:
            levels.append(lowest[0].model_dump(exclude_unset=True))
        places[self.drafter] = len(levels), None
        levels.append({"bigram_model": self.filler})
        for i, candidate in enumerate(every):
            if candidate.level.only_lowest:
                own = [sources.index(source) for source in candidate.level.drafters]
                places[i] = 0, own if len(lowest) > 1 else None
            else:
                places[i] = len(levels), None
                levels.append(candidate.keys())
        return levels, places

    def settings(self, number: int) -> list[dict[str, Any]]:
        """The cascades to time in one pass, the first being number 0, at every batch size."""
        longest = self.task.max_draft_tokens
        lengths = [n for n in LENGTHS if n < longest]
        cascades: list[tuple[list[int], list[int]]] = []
        for i, candidate in enumerate(self.task.candidates):
            cascades.append(([i], [min(4, longest)]))
            if not candidate.level.only_lowest:
                cascades += [([self.drafter, i], [n, n + 1]) for n in lengths]
        cascades += [([self.drafter], [n]) for n in (*lengths, longest)]
        return [
            {
                "levels": levels,
                "draft_lengths": draft_lengths,
                "batch": batch,
                # About STEPS steps of the target.
                "tokens": STEPS * (2 + draft_lengths[-1] // 3),
                "first_prompt": number * len(cascades) + index,
            }
            for batch in self.task.batch_sizes
            for index, (levels, draft_lengths) in enumerate(cascades)
        ]

    def plain_settings(self, number: int) -> list[dict[str, Any]]:
        """The same without speculation."""
        setting = {"levels": [], "draft_lengths": [], "tokens": PLAIN_STEPS, "first_prompt": number}
        return [{**setting, "batch": batch} for batch in self.task.batch_sizes]

    def engine_args(self, speculative: bool) -> dict[str, Any]:
        task = self.task
        arguments = {
            "model": task.target,
            "max_num_seqs": max(task.batch_sizes),
            "enable_prefix_caching": False,
            # What fits into the cache: no text of these is as long as a model's whole context.
            "max_model_len": -1,
            "seed": task.seed,
            **task.engine_args,
        }
        if speculative:
            # All candidates are levels of one cascade, in which every level needs room.
            room = max(task.max_draft_tokens, len(self.levels))
            arguments["speculative_config"] = {
                "method": "hsd",
                "levels": [{**level, "num_tokens": room} for level in self.levels],
                "num_speculative_tokens": room,
                "disable_by_batch_size": max(MAX_BATCH_SIZE, *task.batch_sizes),
                "adaptive": False,
            }
        return arguments

    def engine(self, speculative: bool) -> EngineProcess:
        """The engine with or without speculation; a context manager."""
        if speculative:
            write_store(collect_texts([np.arange(self.vocabulary)], self.vocabulary), self.filler)
        return EngineProcess(
            self.engine_args(speculative), "the engine to time", log=self.directory / "engine.log"
        )

    def run(
        self,
        engine: EngineProcess,
        settings: Sequence[dict[str, Any]],
        advance: Callable[[], None] = lambda: None,
    ) -> list[Recording]:
        """Recordings, one per setting; `advance` is called after each."""
        task, found = self.task, []
        engine.call(recorder.install, task.clock)
        for setting in settings:
            first = setting["first_prompt"]
            chosen = [
                self.prompts[(first + i) % len(self.prompts)] for i in range(setting["batch"])
            ]
            params = {
                "temperature": task.sampling.temperature,
                "top_p": task.sampling.top_p,
                "max_tokens": setting["tokens"],
                "ignore_eos": True,
                # No seed, which would have drafts verified by the noise of plain vLLM's text.
            }
            if levels := setting["levels"]:
                sources = self.places[levels[0]][1]
                places = [self.places[level][0] for level in levels]
                engine.select_levels(places, setting["draft_lengths"], sources)
            recording = engine.call(recorder.record, chosen, params)
            for call in recording["calls"]:
                call["level"] = levels[places.index(call["level"])]
            found.append(recording)
            advance()
        return found

    def measure(self, store: Path, advance: Callable[[], None] = lambda: None) -> Latencies:
        """Run both engines, pass by pass in turn, and make tables of what they took.

        Args:
            store: JSON file that holds what finished passes recorded; a later call continues.
            advance: called `num_settings` times in all.
        """
        order = [(name, number) for number in range(PASSES) for name in ("cascades", "plain")]
        done: dict[str, list[Recording]] = (
            read_json(store, "timing", "vllm-hsd profile") if store.exists() else {}
        )
        with contextlib.ExitStack() as running:
            engines: dict[str, EngineProcess] = {}
            for name, number in order:
                speculative, key = name == "cascades", f"{name} {number}"
                settings = (self.settings if speculative else self.plain_settings)(number)
                if key in done:
                    for _ in settings:
                        advance()
                    continue
                if name not in engines:
                    engines[name] = running.enter_context(self.engine(speculative))
                done[key] = self.run(engines[name], settings, advance)
                write_json(store, done)
        cascades, plain = (
            [recording for number in range(PASSES) for recording in done[f"{name} {number}"]]
            for name in ("cascades", "plain")
        )
        return self.latencies(cascades, plain)

    @property
    def num_settings(self) -> int:
        """Settings that `measure` runs."""
        return PASSES * (len(self.settings(0)) + len(self.plain_settings(0)))

    def latencies(self, cascades: Iterable[Recording], plain: Iterable[Recording]) -> Latencies:
        """Tables by batch size and tokens from recordings, and the machine's load meanwhile."""
        cascades, plain = list(cascades), list(plain)
        calls = [call for recording in cascades for call in recording["calls"]]
        steps = [step for recording in cascades for step in recording["steps"]]
        longest = self.task.max_draft_tokens + 1
        forward = []
        for i, candidate in enumerate(self.task.candidates):
            # The whole call of a lookup; of a forward without what the level adds to it.
            looks_up = candidate.is_lookup
            key = "call_ms" if looks_up else "ms"
            own = ((c["batch"], c["tokens"], c[key]) for c in calls if c["level"] == i)
            forward.append(self._table(1 if looks_up else longest, own))
        target = ((s["batch"], s["tokens"], s["ms"]) for s in steps)
        forward.append(self._table(longest, target))
        overhead: dict[Any, LatencyTable] = {}
        for role, reach in (("draft", 1), ("verify", longest)):
            own_role = [c for c in calls if c["role"] == role]
            extra = [(c["batch"], c["tokens"], c["call_ms"] - c["ms"]) for c in own_role]
            if extra:
                overhead[role] = self._table(reach, extra)
        alone = ((s["batch"], s["tokens"], s["ms"]) for r in plain for s in r["steps"])
        return Latencies(
            forward=forward,
            overhead=overhead,
            plain=self._table(1, alone),
            load=_load([*cascades, *plain], plain),
            dtype=str(self.task.engine_args.get("dtype", "auto")),
        )

    def _table(self, longest: int, samples: Iterable[tuple[int, int, float]]) -> LatencyTable:
        """Samples (batch, tokens of the whole batch, ms) as a table for 1..longest tokens each."""
        found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for batch, tokens, ms in samples:
            found[batch][round(tokens / batch)].append(ms)
        seen = {
            batch: {n: ms for n, ms in found[batch].items() if len(ms) >= SEEN}
            for batch in self.task.batch_sizes
        }
        met = (n for by_tokens in seen.values() for n in by_tokens if n < longest)
        grid = sorted({1, *met, longest})
        rows, spread = [], []
        for batch, by_tokens in seen.items():
            if not by_tokens:
                raise UserError(
                    f"no step of batch size {batch} was seen while timing, so the prompts do not "
                    f"fit into one step: lower --batch-sizes or raise max_num_batched_tokens."
                )
            xs = sorted(by_tokens)
            # Means, since totals add up from them, without pauses of more than PAUSE medians.
            every = (np.array(by_tokens[n]) for n in xs)
            times = [ms[ms <= PAUSE * np.median(ms)] for ms in every]
            means = _rising_but_for_real_falls(times).tolist()
            widths = [np.subtract(*np.quantile(by_tokens[n], (0.75, 0.25))) / 2 for n in xs]
            rows.append([round(max(interpolated(xs, means, n), 1e-6), 6) for n in grid])
            spread.append([round(float(np.interp(n, xs, widths)), 6) for n in grid])
        return LatencyTable(
            batch_sizes=list(self.task.batch_sizes), tokens=grid, ms=rows, spread=spread
        )


def _rising_but_for_real_falls(times: Sequence[np.ndarray]) -> np.ndarray:
    """Means of the samples at ascending token counts, without falls that may be noise.

    Some products of matrices take longer over one or two rows than over three; what is no more than
    FALL standard errors is averaged out.
    """
    means, sizes = np.array([ms.mean() for ms in times]), np.array([len(ms) for ms in times])
    variances = np.array([ms.var(ddof=1) for ms in times]) / sizes
    errors = np.sqrt(variances[1:] + variances[:-1])
    falls = np.flatnonzero(np.diff(means) < -FALL * errors) + 1
    parts = zip(np.split(means, falls), np.split(sizes, falls), strict=True)
    return np.concatenate([isotonic_regression(part, weights=own).x for part, own in parts])


def _load(recordings: Sequence[Recording], plain: Sequence[Recording]) -> MachineLoad:
    """Medians over recordings; the drift is that over batch sizes of those without speculation."""
    times = defaultdict(list)
    for recording in plain:
        by_batch = defaultdict(list)
        for step in recording["steps"]:
            by_batch[step["batch"]].append(step["ms"])
        for batch, ms in by_batch.items():
            times[batch].append(float(np.median(ms)))
    loads = ((recording["other_cores"], recording["steal"]) for recording in recordings)
    return MachineLoad.of(loads, times.values())
