"""Servers for the soak: crowded ones with a cascade."""

import json
from pathlib import Path

import numpy as np
from support.cascades import cascade
from support.level_files import LevelFiles
from support.odd_requests import VOCABULARY
from support.soak_requests import REASONING, prompts

from vllm_hsd.cascade.text_store import collect_texts, write_store

# Chunked prefill, preemption and prefix caching within seconds.
CROWDED = {
    "max-num-seqs": 64,
    "block-size": 32,
    "num-gpu-blocks-override": 24,
    "max-num-batched-tokens": 160,
    "reasoning-config": json.dumps(REASONING),
}


def write_table(path: Path, *more: list[int]) -> str:
    """A store of texts for `three_levels`, `more` among them."""
    texts = [np.array(text) for text in (*prompts(200, seed=4), *more)]
    write_store(collect_texts(texts, vocab_size=VOCABULARY), str(path))
    return str(path)


def two_models(family) -> dict:
    return cascade([{"model": family.small, "num_tokens": 3}, {"model": family.mid}], 6)


def three_levels(family, bigram: str) -> dict:
    config = two_models(family)
    lowest = {"bigram": bigram, "num_tokens": 2}
    return {**config, "levels": [lowest, *config["levels"]], "horizontal_tokens": 2}


def lookups_and_heads(family, files: LevelFiles) -> dict[str, dict]:
    """Name -> a cascade with kinds of levels that `three_levels` has not."""
    ngram, head = {"ngram": {"max": 3}}, {"eagle3": files.eagle3}
    # The oldest outputs soon make room for new ones.
    suffix = {"suffix": {"store": files.store, "shared_tokens": 4000}}
    small, mid = {"model": family.small}, {"model": family.mid}
    levels = {
        "suffix": [suffix],
        "suffix below a model": [{**suffix, "num_tokens": 4}, mid],
        "sources": [{"sources": [ngram, suffix, small], "num_tokens": 3}, mid],
        "eagle3": [head],
        "eagle3 below a model": [{**head, "num_tokens": 2}, {**mid, "max_rounds": 1}],
        "eagle3 in sources": [{"sources": [ngram, suffix, head]}],
        "adaptive": [
            {"sources": [ngram, suffix], "num_tokens": 2},
            {**small, "num_tokens": 3},
            mid,
        ],
    }
    found = {name: cascade(given, 6) for name, given in levels.items()}
    found["head above lookups"] = found["eagle3 in sources"] | {"adaptive": True}
    found["adaptive"]["adaptive"] = True
    return found
