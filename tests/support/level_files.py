"""Files that levels read, built for tiny models, and cascades as vLLM's arguments."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.eagle3_head import write_eagle3_head
from transformers import AutoModelForCausalLM

from vllm_hsd.cascade.exit_head import ExitHead, write_exit_head
from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.tools.exit_head_training import plain_exit_head

# Those of `every_kind`: all but what needs a target or a request of its own.
EVERY_KIND = (
    *("ngram", "suffix", "bigram", "bigram_model", "model", "early_exit", "exit_head", "eagle3"),
    "sources",
)


@dataclass(frozen=True)
class LevelFiles:
    """An exit head on the target's first layer, a store of texts, an EAGLE-3 head."""

    exit_head: str
    store: str
    eagle3: str


def write_level_files(
    target: str, directory: Path, vocab_size: int = 5, trained: bool = False
) -> LevelFiles:
    """The store has random text, the exit head noise, the EAGLE-3 head all tokens but one."""
    names = ("layer-1", "store.safetensors", "eagle3")
    files = LevelFiles(*(str(directory / name) for name in names))
    write_eagle3_head(target, Path(files.eagle3), vocab_size - 1, trained)
    text = np.random.default_rng(0).integers(0, vocab_size, 100 * vocab_size)
    write_store(collect_texts([text], vocab_size), files.store)
    own = target_head(target, layer=1)
    noise = torch.randn(own.weight.shape, generator=torch.Generator().manual_seed(0))
    noisy = own.weight + 0.3 * own.weight.std() * noise
    write_exit_head(replace(own, weight=noisy), Path(files.exit_head))
    return files


def target_head(model: str, layer: int) -> ExitHead:
    """The target's own norm and output head, as an exit head of a layer."""
    return plain_exit_head(AutoModelForCausalLM.from_pretrained(model), layer)


def cascade(*levels: dict, **keys) -> dict:
    """{"speculative_config": ...} of method "hsd"; draft lengths are fixed unless keys say else."""
    keys = {"num_speculative_tokens": 5, "adaptive": False, **keys}
    return {"speculative_config": {"method": "hsd", "levels": list(levels), **keys}}


def filled(part: Any, paths: dict[str, str]) -> Any:
    """A part of a configuration with paths in the place of their names."""
    if isinstance(part, dict):
        return {key: filled(value, paths) for key, value in part.items()}
    if isinstance(part, list):
        return [filled(value, paths) for value in part]
    return paths.get(part, part) if isinstance(part, str) else part


def every_kind(family, files: LevelFiles) -> dict[str, dict]:
    """Kind -> a level of it, for tests that try each."""
    lookup, small = {"ngram": {"max": 3}}, {"model": family.small}
    found = {
        "ngram": lookup,
        "suffix": {"suffix": {"store": files.store, "shared_tokens": 500}},
        "bigram": {"bigram": files.store},
        "bigram_model": {"bigram_model": files.store},
        "model": {"model": family.mid},
        "early_exit": {"early_exit": 1},
        "exit_head": {"exit_head": files.exit_head},
        "eagle3": {"eagle3": files.eagle3},
        "sources": {"sources": [lookup, small]},
    }
    return {kind: found[kind] for kind in EVERY_KIND}
