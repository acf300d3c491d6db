"""Most kinds of levels and keys of the V2 runner: greedy text of the tiny family, in float32.

What `same_text` checks of cascades of models. Lookups find what the texts repeat, and the store
holds texts of the family's kind; a configuration that drafts nothing fails.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from benchmarks.common import MODELS
from benchmarks.gpu import engines
from benchmarks.gpu.items import PART_SECONDS, Finding, Setting
from benchmarks.gpu.same_text import PROMPTS, TOKENS, TOY_PROMPTS, TOY_TOKENS, Plain
from vllm_hsd.tools.planner.prompts import read_prompts

STORE = str(MODELS / "library.safetensors")


def configurations(family: dict[str, str], store: str) -> dict[str, dict[str, Any]]:
    """Speculative configurations by name."""
    ngram, suffix = {"ngram": {"max": 4}}, {"suffix": {"store": store, "shared_tokens": 4096}}
    small, mid = {"model": family["small"], "num_tokens": 2}, {"model": family["mid"]}
    lookups, unsure = [ngram, suffix], {"stopping": "entropy"}
    return {
        "n-gram": engines.cascade(5, ngram),
        "suffix below a model": engines.cascade(6, {**suffix, "num_tokens": 3}, mid),
        "bigram model below a model": engines.cascade(
            6, {"bigram_model": store, "num_tokens": 2}, mid
        ),
        "pairs below an exit": engines.cascade(
            6, {"bigram": store, "num_tokens": 2}, {"early_exit": 1}
        ),
        "sources": engines.cascade(5, {"sources": lookups, "branches": 1}),
        "sources next to a model": engines.cascade(5, {"sources": [*lookups, mid]}),
        "branches": engines.cascade(3, {"sources": lookups, "branches": 3}, adaptive=False),
        "branches of a model": engines.cascade(4, {"model": family["mid"], "branches": 3}),
        "branches, adaptive": engines.cascade(
            4, {"sources": lookups, "branches": 2}, adaptive=True
        ),
        "entropy": engines.cascade(6, {**small, **unsure}, {**mid, **unsure}),
        "horizontal": engines.cascade(6, small, mid, horizontal_tokens=2),
        "unverified": engines.cascade(6, small, {**mid, "verifier": "none"}),
        "coupled": engines.cascade(5, small, mid, verifier="coupled"),
    }


def run(setting: Setting, family: dict[str, str] = engines.TINY, store: str = STORE) -> Finding:
    """Greedy text of every kind of level against that of no speculation.

    Args:
        family: directories of target, mid and small.
        store: texts of their kind.
    """
    engines.require_vllm()
    count, tokens = (TOY_PROMPTS, TOY_TOKENS) if setting.toy else (PROMPTS, TOKENS)
    asked = read_prompts(MODELS / "prompts.jsonl")[:count]
    greedy = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    arguments = engines.TINY_ARGS | {"model": family["target"]}
    lines, waiting = [], []
    with Plain(setting, "levels plain", arguments, asked, greedy) as plain:

        def compared(name: str, config: dict[str, Any]) -> dict[str, Any]:
            own = arguments | {"speculative_config": config}
            with engines.engine(setting, f"levels {name}", own) as process:
                found = process.generate(asked, greedy)
            if not found.drafted and not setting.toy:
                pytest.fail(f"{name}: nothing was drafted.")
            share = f" {found.accepted} of {found.drafted} draft tokens accepted."
            return {"line": plain.greedy_line(name, found) + share}

        for name, config in configurations(family, store).items():
            seconds = plain.seconds(PART_SECONDS)
            part = setting.part(name, partial(compared, name, config), seconds)
            if part is None:
                waiting.append(name)
            else:
                lines.append(part["line"])
    return Finding(lines, waiting=waiting)
