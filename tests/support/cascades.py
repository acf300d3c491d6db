"""Configurations of cascades and of vLLM's drafters, by the names that tests of engines use."""

from pathlib import Path

import numpy as np
from support import level_files
from support.eagle3_head import write_eagle3_head
from support.engines import PROMPTS
from support.level_files import target_head
from support.stock_heads import write_mtp_target
from support.tiny_models import greedy_text

from vllm_hsd.cascade.exit_head import write_exit_head
from vllm_hsd.cascade.text_store import collect_texts, write_store


def cascade(levels: list[dict], tokens: int = 4) -> dict:
    """The configuration alone; with `adaptive` a busy machine may draft nothing."""
    return level_files.cascade(*levels, num_speculative_tokens=tokens)["speculative_config"]


def texts_of(family) -> str:
    """A store of what the target writes after the prompts, itself."""
    path = Path(family.target).with_name("texts.safetensors")
    if not path.exists():
        prompts = [[token % family.vocabulary for token in prompt] for prompt in PROMPTS]
        pairs = zip(prompts, greedy_text(family.target, prompts, 8), strict=True)
        texts = [np.array(prompt + text) for prompt, text in pairs]
        write_store(collect_texts(texts, family.vocabulary), str(path))
    return str(path)


def head(family) -> str:
    path = Path(family.target).with_name("head")
    if not path.exists():
        write_eagle3_head(family.target, path)
    return str(path)


def embedding_head(family) -> str:
    """The target's norm and output head, on its embedding."""
    path = Path(family.target).with_name("layer-0")
    if not path.exists():
        write_exit_head(target_head(family.target, layer=0), path)
    return str(path)


def target_of(name: str, family) -> str:
    """The target, with a layer that drafts for it if that is asked for."""
    path = Path(family.target).with_name("mtp")
    if name == "mtp" and not path.exists():
        write_mtp_target(family.target, path)
    return str(path) if name == "mtp" else family.target


def stock(method: str, **keys) -> dict:
    """One of vLLM's drafters below our verifier."""
    keys = {"num_speculative_tokens": 4, **keys}
    return {"method": method, "rejection_sample_method": "hierarchical", **keys}


DRAWN = {"draft_sample_method": "probabilistic"}


def configuration(name: str, family) -> dict:
    stored = any(part in name for part in ("suffix", "sources", "pairs", "choice"))
    store = texts_of(family) if stored else None
    target, mid, small = ({"model": getattr(family, each)} for each in ("target", "mid", "small"))
    one, two, entropy = {"num_tokens": 1}, {"num_tokens": 2}, {"stopping": "entropy"}
    ngram, early_exit, eagle3 = {"ngram": {"max": 3}}, {"early_exit": 1}, {"eagle3": head(family)}
    suffix = {"suffix": {"min_acceptance": 0.01, "store": store, "shared_tokens": 300}}
    found, of_head = {"sources": [ngram, suffix]}, {"sources": [suffix, eagle3]}
    return {
        "suffix": cascade([suffix]),
        "suffix, model": cascade([suffix | two, mid]),
        "sources, model": cascade([found | two, mid]),
        "choice": cascade([{"sources": [ngram, suffix, mid]}]),
        "choice, model": cascade([{"sources": [suffix, early_exit]} | two, mid]),
        "choice with a head": cascade([of_head]),
        "head, model": cascade([eagle3 | two, mid], 5),
        "choice with a head, model": cascade([of_head | two, mid], 5),
        "two models": cascade([small | one, mid]),
        "entropy": cascade([small | two | entropy, mid | entropy]),
        "pairs, model": cascade([{"bigram_model": store} | two, mid]),
        "horizontal": cascade([small | one, mid]) | {"horizontal_tokens": 2},
        "three equal": cascade([target | one, target | two, target], 5),
        "lookup, exit, model": cascade([ngram | one, early_exit | two, mid], 5),
        "embedding, exit": cascade([{"exit_head": embedding_head(family)} | one, early_exit]),
        "mtp": cascade([{"mtp": {}}], 2),
        "stock model, equal": stock("draft_model", model=family.target, **DRAWN),
        "stock model, argmax": stock("draft_model", model=family.mid, draft_sample_method="greedy"),
        "stock head": stock("eagle3", model=head(family), **DRAWN),
        "stock n-gram": stock("ngram_gpu", prompt_lookup_max=3, prompt_lookup_min=1),
    }[name]
