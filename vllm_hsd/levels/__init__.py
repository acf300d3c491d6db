"""The kinds of levels, a file each: keys, checks, construction.

A new kind is a subclass of `base.LevelConfig` in a file of its own that is imported here.
Everything else loops over `KINDS`.
"""

from vllm_hsd.levels import (
    bigram,
    bigram_model,
    eagle3,
    early_exit,
    exit_head,
    model,
    mtp,
    ngram,
    prediction,
    sources,
    suffix,
)
from vllm_hsd.levels.any_kind import Level
from vllm_hsd.levels.base import KINDS, Keys, LevelConfig, Name, Target, Tokens, Verifier

__all__ = [
    "KINDS",
    "Keys",
    "Level",
    "LevelConfig",
    "Name",
    "Target",
    "Tokens",
    "Verifier",
    "bigram",
    "bigram_model",
    "eagle3",
    "early_exit",
    "exit_head",
    "model",
    "mtp",
    "ngram",
    "prediction",
    "sources",
    "suffix",
]
