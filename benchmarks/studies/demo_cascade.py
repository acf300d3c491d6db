"""`vllm-hsd bench` on the tiny family: a cascade, single drafters and no speculation.

    python -m benchmarks.studies.demo_cascade         # or `make demo-cascade`; five minutes

The target is zero-padded (see benchmarks/models/zero_pad.py): on a CPU the tiny one costs no more
than its drafters. Ends with status 1 if greedy outputs differ.
"""

import argparse
import os
from pathlib import Path

from benchmarks.common import (
    ENGINE_ARGS,
    MODELS,
    PADDED_NOTE,
    RESULTS,
    commit,
    padded_target,
    prompts,
)
from benchmarks.studies.configs import fixed
from vllm_hsd.cli import bench
from vllm_hsd.cli.bench_jobs import Comparison
from vllm_hsd.cli.options import integers

# Results name these paths: relative ones say nothing about the machine.
PAIRS = {"ngram_model": os.path.relpath(MODELS / "library.safetensors"), "order": 1}
SMALL = {"model": os.path.relpath(MODELS / "small")}
MID = {"model": os.path.relpath(MODELS / "mid")}


def cascade(*levels: dict) -> dict:
    """A configuration of levels that have their draft lengths under "num_tokens"."""
    return fixed(*levels, length=levels[-1]["num_tokens"])


CONFIGS = [
    cascade({"ngram": {"max": 4}, "num_tokens": 4}),
    cascade({**MID, "num_tokens": 5}),
    cascade({**PAIRS, "num_tokens": 3}, {**MID, "num_tokens": 12}),
    cascade({**PAIRS, "num_tokens": 2}, {**SMALL, "num_tokens": 4}, {**MID, "num_tokens": 8}),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch-sizes", type=integers, default=[1])
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "demo_cascade")
    options = parser.parse_args()
    print(f"Note: {PADDED_NOTE}. A token is a byte: read the ratios, not the rates.")
    keys = ("dtype", "enforce_eager", "kv_cache_memory_bytes")
    comparison = Comparison(
        model=os.path.relpath(padded_target()),
        configs=[None, *CONFIGS],
        prompts=prompts(),
        batch_sizes=options.batch_sizes,
        temperatures=[0.0, 1.0],
        max_tokens=options.max_tokens,
        num_prompts=options.num_prompts,
        rounds=options.rounds,
        engine_args={key: ENGINE_ARGS[key] for key in keys},
        output=options.output,
    )
    status = bench.run(comparison, commit=commit(), note=PADDED_NOTE)
    if status == 0:
        print("Greedy outputs are equal, token for token.")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
