"""Speculative configurations of the real model: every source of drafts alone, and their mix."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.common import MODELS, REPOSITORY

DRAFT_LENGTH = 8
NGRAM: dict[str, Any] = {"ngram": {"max": 4}}
# Results name these paths: relative ones say nothing about the machine.
STORE = MODELS / "smollm2-suffix" / "store.safetensors"
HEAD = MODELS / "smollm2-eagle3"
SUFFIX: dict[str, Any] = {"suffix": {"store": os.path.relpath(STORE)}}
EAGLE3: dict[str, Any] = {"eagle3": os.path.relpath(HEAD)}


def fixed(*levels: dict[str, Any], length: int = DRAFT_LENGTH, **keys: Any) -> dict[str, Any]:
    """A configuration of levels, by default of fixed draft lengths.

    Args:
        length: tokens that the target verifies at most.
        keys: further ones of the cascade.
    """
    config = {"method": "hsd", "num_speculative_tokens": length, "levels": list(levels)}
    return {**config, "adaptive": False, **keys}


def planned(file: Path) -> dict[str, Any]:
    """The cascade that `vllm-hsd plan` wrote; paths inside the repository are relative ones."""
    found = json.loads(file.read_text().replace(f"{REPOSITORY}/", ""))
    keys = {key: found[key] for key in ("num_speculative_tokens", "levels")}
    return {"method": "hsd", "adaptive": False, **keys}


def vllms_own() -> dict[str, dict[str, Any]]:
    """vLLM's own methods, by the names of the tables, as its documentation sets them."""
    lookup = {"method": "ngram", "num_speculative_tokens": DRAFT_LENGTH, "prompt_lookup_max": 4}
    head = {"method": "eagle3", "model": os.path.relpath(HEAD), "num_speculative_tokens": 3}
    found = {"vLLM's ngram": lookup}
    return {**found, "vLLM's eagle3": head} if has_head() else found


def ours() -> dict[str, dict[str, Any]]:
    """The best lookup, and all sources in one level, as they are without further keys."""
    found = {"suffix": fixed(SUFFIX, adaptive=True)}
    together = fixed({"sources": [SUFFIX, EAGLE3]})
    # As the platform has it: on a GPU vLLM's drafter serves it, which does not adapt.
    del together["adaptive"]
    return {**found, "suffix+eagle3": together} if has_head() else found


def has_head() -> bool:
    """Whether this installation has the EAGLE-3 head."""
    return (HEAD / "config.json").is_file()
