"""vLLM's V1 and V2 runners on one CPU, in turn on the same prompts: tokens per second and a step.

    python -m benchmarks.studies.runners --prompts DIR          # or `make bench-runners`

SmolLM2 with lookups, or Qwen2.5-Coder with a lookup, a model and both (`--family`). On V2 every
launch of a Triton kernel is counted and timed.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import sweep
from benchmarks.common import RESULTS, write_csv
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.models.smollm2 import smollm2
from benchmarks.studies.configs import NGRAM, SUFFIX, fixed
from benchmarks.studies.family import configs as qwen_configs
from benchmarks.sweep import PLAIN
from vllm_hsd.engine import EngineProcess, Generation, generate
from vllm_hsd.planner.prompts import encode

RUNNERS = {"V1": "0", "V2": "1"}
BATCHES = 1, 16
LONGEST_PROMPT = 600
# Drafts nothing, so that a step costs what the level adds to it.
SILENT = {"suffix": {"min_acceptance": 1.0}}


def configs(family: bool) -> dict[str, dict[str, Any] | None]:
    """By the names of the tables."""
    if family:
        named = ("suffix 8", "0.5B 3", "suffix 4 < 0.5B 8", "adaptive: suffix 4 < 0.5B 8")
        found = qwen_configs()
        return {PLAIN: None, **{name: found[name] for name in named}}
    mixed = {"sources": [SUFFIX, NGRAM], "branches": 4}
    return {
        PLAIN: None,
        "suffix 8": fixed(SUFFIX),
        "suffix that drafts nothing": fixed(SILENT),
        "adaptive: suffix 8": fixed(SUFFIX, adaptive=True),
        "adaptive: sources, 4 rows": fixed(mixed, length=4, adaptive=True),
    }


def launches(
    llm: Any, prompts: Sequence[Sequence[int]], params: Mapping[str, Any]
) -> dict[str, float]:
    """Seconds of the target's pass and of Triton's launches, and their number; in V2's process."""
    from triton.runtime.jit import JITFunction

    found = {"launches": 0.0, "in launches": 0.0, "target's pass": 0.0}

    def timed(name: str, function: Any, counted: str = "") -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                found[name] += time.perf_counter() - began
                if counted:
                    found[counted] += 1

        return call

    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    with ExitStack() as stack:
        # Not `run`: a replaced one sends every launch Triton's long way.
        kernel = JITFunction.__getitem__
        stack.enter_context(
            patch.object(
                JITFunction,
                "__getitem__",
                lambda jit, grid: timed("in launches", kernel(jit, grid), "launches"),
            )
        )
        forward = timed("target's pass", model.forward)
        stack.enter_context(patch.object(model, "forward", forward))
        answered = generate(llm, list(prompts), [params] * len(prompts))
    steps = max(answered.target_steps)
    return {"ms": 1e3 * answered.seconds / steps} | {
        name: value / steps * (1 if name == "launches" else 1e3) for name, value in found.items()
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """(geometric mean of ours over theirs, its standard error)."""
    logs = np.log(np.array(ours) / np.array(theirs))
    mean = float(np.exp(logs.mean()))
    return mean, mean * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "runners", sets=True)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--family", action="store_true", help="Qwen2.5-Coder, not SmolLM2")
    parser.add_argument("--only", nargs="+", help="names of configurations")
    parser.add_argument(
        "--apart", action="store_true", help="two engines at a time, of one configuration"
    )
    options = parser.parse_args()
    texts, _ = sweep.read_sets(options.prompts, options.num_prompts)
    target = os.path.relpath(qwen_coder("1.5B")) if options.family else str(smollm2())
    arguments = {
        "model": options.model or target,
        "dtype": options.dtype,
        "enforce_eager": not options.compiled,
        "max_model_len": 1024,
        "max_num_seqs": max(options.batches),
        "kv_cache_memory_bytes": 1 << 28 if options.family else 1 << 30,
        "enable_prefix_caching": False,
    }
    chosen = configs(options.family)
    names = options.only or list(chosen)
    rows: list[dict[str, Any]] = []
    for together in [[name] for name in names] if options.apart else [names]:
        rows += compare({name: chosen[name] for name in together}, arguments, texts, options)
    label = "compiled" if options.compiled else "eager"
    family = "_family" if options.family else ""
    write_csv(options.output / f"runners{family}_{label}_{options.dtype}.csv", rows)
    return 0


def compare(
    chosen: Mapping[str, dict[str, Any] | None],
    arguments: Mapping[str, Any],
    texts: Sequence[Any],
    options: Any,
) -> list[dict[str, Any]]:
    """Rows of the table: engines of some configurations on both runners, in turn."""
    keys = [(runner, name) for name in chosen for runner in RUNNERS]
    params = {"temperature": 0.0, "max_tokens": options.max_tokens, "ignore_eos": True}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines, starts = {}, {}
        for runner, name in keys:
            config = chosen[name]
            given = {**arguments} | ({"speculative_config": config} if config else {})
            label = f"{runner} {name}"
            began = time.perf_counter()
            engine = stack.enter_context(
                EngineProcess(
                    given,
                    label,
                    log=options.output / "logs" / f"{label.replace(' ', '_')}.log",
                    environment={"VLLM_USE_V2_MODEL_RUNNER": RUNNERS[runner]},
                )
            )
            engine.wait()
            starts[runner, name] = time.perf_counter() - began
            engines[runner, name] = engine
        first = engines[keys[0]]
        ids = first.call("benchmarks.studies.runners:token_ids", texts)
        for engine in engines.values():
            engine.generate(ids[:2], params)
        for batch in options.batches:
            groups = [ids[i : i + batch] for i in range(0, len(ids), batch)]
            groups = [group for group in groups if len(group) == batch]
            found: dict[tuple[str, str], list[Generation]] = {key: [] for key in keys}
            for turn, group in enumerate(groups):
                for i in range(len(keys)):
                    key = keys[(turn + i) % len(keys)]
                    found[key].append(engines[key].generate(group, params))
                print(f"batch {batch}: {turn + 1} of {len(groups)}", flush=True)
            for runner, name in keys:
                own, v1 = found[runner, name], found["V1", name]
                seconds = [each.seconds for each in own]
                steps = [max(each.target_steps) for each in own]
                over_v1, error = ratio([e.seconds for e in v1], seconds)
                over_plain = 0.0
                if plain := found.get((runner, PLAIN)):
                    over_plain, _ = ratio([e.seconds for e in plain], seconds)
                same = sum(a.token_ids == b.token_ids for a, b in zip(own, v1, strict=True))
                row = {
                    "configuration": name,
                    "batch": batch,
                    "runner": runner,
                    "answers": batch * len(own),
                    "tokens per second": sum(e.num_tokens for e in own) / sum(seconds),
                    "over V1": over_v1,
                    "standard error": error,
                    "over no speculation": over_plain or "",
                    "ms per step": 1e3 * sum(seconds) / sum(steps),
                    "tokens per step": sum(e.num_tokens for e in own) / batch / sum(steps),
                    "batches with V1's text": f"{same} of {len(own)}",
                    "seconds to start": starts[runner, name],
                }
                shares = dict.fromkeys(("ms", "launches", "in launches", "target's pass"), 0.0)
                if runner == "V2":
                    work = "benchmarks.studies.runners:launches"
                    shares = engines[runner, name].call(work, groups[0], params)
                rows.append(row | {f"a step: {key}": value for key, value in shares.items()})
                print(rows[-1], flush=True)
    return rows


def token_ids(llm: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """Runs in an engine's process."""
    return [encode(llm.get_tokenizer(), prompt, LONGEST_PROMPT) for prompt in prompts]


if __name__ == "__main__":
    raise SystemExit(main())
