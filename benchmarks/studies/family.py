"""Cascades and single drafters below a real model: Qwen2.5-Coder 1.5B and 0.5B.

    python -m benchmarks.studies.family --prompts DIR      # or `make bench-family`

No speculation, vLLM's own methods, our single drafters of several lengths and cascades of a lookup
below the 0.5B take turns on the same prompts: the sets of DIR that SETS names, and
edits of functions (`studies.edits`).
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import sweep
from benchmarks.common import RESULTS
from benchmarks.models.qwen_coder import qwen_coder
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies import edits
from benchmarks.studies.configs import fixed
from benchmarks.sweep import Config, Group
from vllm_hsd.tools.cli.options import numbers

SETS = "humaneval", "mt_bench", "gsm8k", "sum"
SUFFIX: dict[str, Any] = {"suffix": {}}


def configs() -> dict[str, Config]:
    """By the names of the tables; one engine serves all of fixed lengths."""
    small = {"model": os.path.relpath(qwen_coder("0.5B"))}
    below = {4: {**SUFFIX, "num_tokens": 4}, 8: {**SUFFIX, "num_tokens": 8}}
    return {
        "suffix 8 < 0.5B 8": fixed(below[8], small, length=8),
        "suffix 4 < 0.5B 8": fixed(below[4], small, length=8),
        "suffix 4 < 0.5B 4": fixed(below[4], small, length=4),
        **{f"0.5B {n}": fixed(small, length=n) for n in (4, 3, 2)},
        "suffix 8": fixed(SUFFIX, length=8),
        "adaptive: suffix 4 < 0.5B 8": fixed(below[4], small, length=8, adaptive=True),
        "vLLM's draft_model 3": {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            **small,
        },
    }


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "family", sets=True)
    parser.add_argument("--temperatures", type=numbers, default=[0.0])
    parser.add_argument("--only", nargs="+", help="names of configurations")
    options = parser.parse_args()
    options.model = options.model or os.path.relpath(qwen_coder("1.5B"))
    chosen = {k: v for k, v in configs().items() if not options.only or k in options.only}
    with tempfile.TemporaryDirectory() as directory:
        for name in SETS if options.prompts else ():
            shutil.copy(options.prompts / f"{name}.jsonl", directory)
        edits.write(Path(directory, "edits.jsonl"))
        options.prompts = Path(directory)
        return sweep.study(
            "family",
            [Group("family", chosen, options.temperatures)],
            options,
            engines_class=SharedEngines,
            kv_cache_memory_bytes=1 << 28,
        )


if __name__ == "__main__":
    raise SystemExit(main())
