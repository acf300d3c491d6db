"""A cascade below a real model: Qwen2.5-Coder 1.5B, its 0.5B, and what a lookup finds.

    python -m benchmarks.studies.demo_cascade     # or `make demo-cascade`; at most ten minutes

As `benchmarks.studies.demo`, on prompts of programmers (family_prompts.jsonl: new code, edits of a
file, tests for a file, questions; four of each): no speculation, the lookup and the 0.5B alone, a
lookup below the 0.5B with fixed lengths and adaptively, and where memory allows vLLM's own
`draft_model`; after a run with --plan (`make plan-cascade`) also what `vllm-hsd plan` chooses.
Writes demo_cascade.csv and demo_cascade.png.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import RESULTS
from benchmarks.models.qwen_coder import check_memory, qwen_coder
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies import demo
from benchmarks.studies.configs import fixed, planned, vllms_own
from vllm_hsd.tools.cli import main as cli
from vllm_hsd.tools.dtype import choose_dtype

OUTPUT = RESULTS / "demo_cascade"
PROFILE, CASCADE = OUTPUT / "profile.json", OUTPUT / "cascade.json"
PROMPTS = Path(__file__).parent / "family_prompts.jsonl"
# The last prompts of each kind; the demo begins with the first ones.
PLANNED_ON = 2
SUFFIX: dict[str, Any] = {"suffix": {}}
# In 16 bits, of three targets and two drafters at once, one pair twice while it loads; float32
# takes twice as much. vLLM's own methods come on top, a target each.
MEMORY = 21 << 30
OWN_MEMORY = {"vLLM's ngram": 6 << 30, "vLLM's draft_model (0.5B)": 8 << 30}


class LoadedEngines(SharedEngines):
    """All stay loaded: `MEMORY` has counted them."""

    measures_memory = False


def scale(dtype: str) -> int:
    """Memory over that of 16 bits."""
    return 2 if dtype == "float32" else 1


def configs(dtype: str) -> dict[str, dict[str, Any]]:
    """By the names of the tables; one engine serves all of fixed lengths."""
    small = {"model": os.path.relpath(qwen_coder("0.5B"))}
    below = {**SUFFIX, "num_tokens": 8}
    own = {
        "vLLM's ngram": vllms_own()["vLLM's ngram"],
        "vLLM's draft_model (0.5B)": {
            "method": "draft_model",
            "num_speculative_tokens": 3,
            **small,
        },
    }
    # Where time is short the last ones are left out.
    found = {
        "suffix < 0.5B": fixed(below, small, length=8),
        "suffix < 0.5B, adaptive": fixed(below, small, length=8, adaptive=True),
    }
    left = psutil.virtual_memory().available - MEMORY * scale(dtype)
    for name, config in own.items():
        more = OWN_MEMORY[name] * scale(dtype)
        if left >= more:
            found[name], left = config, left - more
        else:
            print(f"{name} is left out: it takes {more >> 30} GiB more than the other engines.")
    found |= {"suffix": fixed(SUFFIX, length=8), "0.5B": fixed(small, length=3)}
    if CASCADE.exists():
        # Where the paths are those of the other configurations, one engine serves both.
        found["planned"] = planned(CASCADE)
    return found


def plan(model: str, dtype: str) -> int:
    """Write what `vllm-hsd plan` chooses among the 0.5B and a lookup."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    by_kind = demo.read_prompts(PROMPTS)
    texts = [text for kind in by_kind.values() for text in kind[-PLANNED_ON:]]
    prompts = OUTPUT / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    engine = {"dtype": dtype, "enforce_eager": True, "max_model_len": 4096}
    measured = cli.main(
        [
            *("profile", "--target", model, "--models", os.path.relpath(qwen_coder("0.5B"))),
            *("--suffix", "--prompts", os.path.relpath(prompts), "--max-draft-tokens", "8"),
            *("--temperature", "0", "--engine-args", json.dumps(engine)),
            *("--output", os.path.relpath(PROFILE)),
        ]
    )
    return measured or cli.main(["plan", os.path.relpath(PROFILE), "--output", str(CASCADE)])


def main() -> int:
    parser = demo.options(__doc__, OUTPUT, 9.0)
    parser.set_defaults(max_tokens=64, rounds=4)
    parser.add_argument(
        "--plan", action="store_true", help="measure and choose a cascade for later runs instead"
    )
    chosen = parser.parse_args()
    try:
        chosen.model = chosen.model or os.path.relpath(qwen_coder("1.5B"))
        if chosen.dtype == "auto":
            chosen.dtype = choose_dtype(chosen.model).dtype
        if chosen.plan:
            return plan(chosen.model, chosen.dtype)
        check_memory(MEMORY * scale(chosen.dtype), "This demo")
    except MemoryError as error:
        sys.exit(str(error))
    memory = {"kv_cache_memory_bytes": 1 << 28, "max_model_len": 4096}
    return demo.run(
        chosen,
        configs(chosen.dtype),
        "demo_cascade",
        "Qwen2.5-Coder-1.5B-Instruct",
        LoadedEngines,
        prompts=PROMPTS,
        **memory,
    )


if __name__ == "__main__":
    raise SystemExit(main())
