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
from collections.abc import Mapping
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.models.smollm2 import int8, smollm2, zero_padded
from benchmarks.studies import demo
from benchmarks.studies.configs import NGRAM_MODEL, SUFFIX, fixed, levels, planned, vllms_own
from vllm_hsd.cli import main as cli
from vllm_hsd.cli.bench_jobs import Comparison, Setup, config_name
from vllm_hsd.cli.bench_runs import Engines
from vllm_hsd.config import CascadeConfig
from vllm_hsd.dtype import choose_dtype
from vllm_hsd.engine import EngineProcess

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


class SharedEngines(Engines):
    """One engine for cascades whose levels are among those of another: memory for all at once."""

    def __init__(self, comparison: Comparison, setup: Setup) -> None:
        self.hosts = hosts(comparison.configs)
        super().__init__(comparison, setup)

    def count(self, comparison: Comparison) -> int:
        """See `Engines.count`."""
        return len({host for host, _ in self.hosts.values()})

    def get(self, index: int) -> EngineProcess:
        """See `Engines.get`."""
        host, places = self.hosts[index]
        engine = super().get(host)
        if places:
            cascade = CascadeConfig.parse(_keys(self._comparison.configs[index]))
            engine.select_levels(places, cascade.draft_lengths)
        return engine


def hosts(configs: list[dict[str, Any] | None]) -> dict[int, tuple[int, list[int]]]:
    """By configuration: the one whose engine serves it, and which of its levels it takes (none: all
    of an engine of its own)."""
    found: dict[int, tuple[int, list[int]]] = {}
    for index, config in enumerate(configs):
        found[index] = index, []
        if config is None or config.get("adaptive") is not False:
            continue
        for host in range(index + 1):
            if host == found[host][0] and (places := _places(config, configs[host])):
                found[index] = host, places
                break
    return found


def _places(config: Mapping[str, Any], host: Mapping[str, Any] | None) -> list[int]:
    """Where the levels of a cascade are among those of another that could serve it."""
    if host is None or host.get("adaptive") is not False:
        return []
    theirs, mine = (CascadeConfig.parse(_keys(each)) for each in (host, config))
    places: list[int] = []
    for level, length in zip(mine.levels, mine.draft_lengths, strict=True):
        options = [
            place
            for place in range(places[-1] + 1 if places else 0, len(theirs.levels))
            if _alike(theirs.levels[place], level) and theirs.draft_lengths[place] >= length
        ]
        if not options:
            return []
        places.append(options[0])
    return places if theirs.verifier == mine.verifier else []


def _alike(one: Any, other: Any) -> bool:
    return bool(
        one.model_copy(update={"num_tokens": None}) == other.model_copy(update={"num_tokens": None})
    )


def _keys(config: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (config or {}).items() if key != "method"}


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
