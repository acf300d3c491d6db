"""Cascades on real text, below a target that costs as much as a larger one.

    python -m benchmarks.studies.demo_cascade     # or `make demo-cascade`; at most ten minutes

As `benchmarks.studies.demo`, but the target is SmolLM2-135M-Instruct *zero-padded* to 800 M
parameters, 400 M in 32 bits (benchmarks/models/zero_pad.py): the text and the acceptance of the
real model at the cost of a larger one, next to which a head and an 8-bit copy of the real model are
cheap. Half of the kinds of prompts; vLLM's own methods, single drafters, and cascades of two and
three levels; after a run with --plan (`make plan-cascade`) also what `vllm-hsd plan` chooses.
Writes demo_cascade.csv and demo_cascade.png.
"""

import json
import os
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.models.smollm2 import int8, smollm2, zero_padded
from benchmarks.shared_engines import SharedEngines
from benchmarks.studies import demo
from benchmarks.studies.configs import NGRAM_MODEL, SUFFIX, fixed, levels, planned, vllms_own
from vllm_hsd.tools.cli import main as cli
from vllm_hsd.tools.cli.bench_jobs import config_name
from vllm_hsd.tools.dtype import choose_dtype

# Weights of 1.6 GB: six engines stay loaded in 16 GB.
PARAMS = {"float32": 400e6}
DEFAULT_PARAMS = 800e6
OUTPUT = RESULTS / "demo_cascade"
PROFILE, CASCADE = OUTPUT / "profile.json", OUTPUT / "cascade.json"
PROMPTS = OUTPUT / "prompts.jsonl"
KINDS = ["question", "code edit", "summary"]


def cascades() -> dict[str, dict[str, Any]]:
    """The 8-bit copy, and what this installation has of lookups and heads: alone and below it.

    Deep cascades come first: they host the others. The fixed lengths are those of
    `benchmarks.studies.configs`, longer where the copy passes them on.
    """
    copy = {"model": os.path.relpath(int8())}
    head = [level for level in levels() if "eagle3" in level]
    lookup = [level for level in levels() if level not in head][-1]
    found = [
        fixed({**lookup, "num_tokens": 8}, {**NGRAM_MODEL, "num_tokens": 10}, copy, length=12),
        fixed({**lookup, "num_tokens": 4}, copy, length=12),
        *(fixed({**level, "num_tokens": 3}, copy, length=12) for level in head),
        fixed(lookup),
        *(fixed(level, length=3) for level in head),
        fixed(copy),
    ]
    return {config_name(config): config for config in found}


def plan(model: str, dtype: str) -> int:
    """Write what `vllm-hsd plan` chooses among the 8-bit copy and a lookup below it."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    lookup = f"--suffix {SUFFIX['suffix']['store']}" if SUFFIX in levels() else "--ngram"
    # The first two rounds answer other prompts than those that the cascade is planned on.
    by_kind = demo.read_demo_prompts()
    lines = [json.dumps({"turns": [text]}) for kind in KINDS for text in by_kind[kind][2:]]
    PROMPTS.write_text("\n".join(lines))
    profile, cascade, prompts = map(os.path.relpath, (PROFILE, CASCADE, PROMPTS))
    engine = json.dumps({"dtype": dtype, "enforce_eager": True}, separators=(",", ":"))
    measured = cli.main(
        f"profile --target {model} --models {os.path.relpath(int8())} {lookup} --prompts {prompts} "
        f"--max-draft-tokens 12 --temperature 0 "
        f"--engine-args {engine} --output {profile}".split()
    )
    return measured or cli.main(f"plan {profile} --output {cascade}".split())


def main() -> int:
    parser = demo.options(__doc__, OUTPUT, 7.0)
    parser.set_defaults(max_tokens=32, kinds=KINDS)
    parser.add_argument(
        "--plan", action="store_true", help="measure and choose a cascade for later runs instead"
    )
    chosen = parser.parse_args()
    if chosen.dtype == "auto":
        chosen.dtype = choose_dtype(str(smollm2())).dtype
    params = PARAMS.get(chosen.dtype, DEFAULT_PARAMS)
    chosen.model = chosen.model or os.path.relpath(zero_padded(params))
    if chosen.plan:
        return plan(chosen.model, chosen.dtype)
    name = f"SmolLM2-135M-Instruct zero-padded to {params / 1e6:.0f} M parameters"
    print(f"The target is {name}: its text and acceptance at the cost of a larger model.")
    configs = {**vllms_own(), **cascades()}
    if CASCADE.exists():
        # Where the paths are those of the other configurations, one engine serves both.
        config = planned(CASCADE)
        configs[f"planned: {config_name(config)}"] = config
    # All engines stay loaded: a cache for one text leaves memory for their weights.
    memory = {"kv_cache_memory_bytes": 1 << 28}
    return demo.run(chosen, configs, "demo_cascade", name, SharedEngines, **memory)


if __name__ == "__main__":
    raise SystemExit(main())
