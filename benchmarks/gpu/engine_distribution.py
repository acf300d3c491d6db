"""Text of whole engines against the target's distribution, by transformers in float64.

In one control the verifier is told another temperature of the drafts than they were drawn at, in
the other one it accepts by a ratio that is slightly too large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import engines, pit
from benchmarks.gpu.faults import install, install_generous
from benchmarks.gpu.items import Finding, Setting

# 256 requests of 800 tokens are 200,000; the controls get 65,536.
REQUESTS, TOKENS, CONTROL_TOKENS = 256, 800, 256
TOY_REQUESTS, TOY_TOKENS = 6, 24
# Texts that transformers reads at once.
AT_ONCE = 8


def configurations(family: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Speculative configurations by name, all with mid on top; the first is also the controls'."""
    small, mid = {"model": family["small"]}, {"model": family["mid"]}
    lookup = {"ngram": {"max": 3}, "num_tokens": 1}
    suffix = {"suffix": {"min_acceptance": 0.01, "shared_tokens": 1000}}
    sources = {"sources": [{"ngram": {"max": 3}}, suffix], "num_tokens": 2}
    return {
        "two levels": engines.cascade(5, small | {"num_tokens": 2}, mid),
        "three levels": engines.cascade(5, lookup, small | {"num_tokens": 2}, mid),
        "suffix below mid": engines.cascade(5, suffix | {"num_tokens": 2}, mid),
        "sources below mid": engines.cascade(5, sources, mid),
        "vLLM's drafter, our verifier": engines.draft_model(family["mid"], 4, "hierarchical"),
    }


def run(setting: Setting, family: dict[str, str] = engines.TINY) -> Finding:
    """See the module.

    Args:
        family: directories of target, mid and small.
    """
    engines.require_vllm()
    configs = configurations(family)
    faults: dict[str, Callable[[], None] | None] = {name: None for name in configs}
    faults |= {
        "two levels, colder drafts": install,
        "two levels, generous": install_generous,
    }
    rows, left_out = [], []
    for name, fault in faults.items():
        if setting.time_left() < engines.ENGINE_SECONDS:
            left_out.append(f"{name}: no time left.")
            continue
        config = configs[name.partition(",")[0] if fault else name]
        found, rate = _texts(setting, family, name, config, fault)
        # A few tokens cannot show a bias that strongly.
        rejected = None if setting.toy else pit.REJECTED
        biased = fault is not None
        rows.append(pit.checked_row("configuration", name, found, rate, biased, rejected))
    return Finding([pit.sentence(row, row["configuration"]) for row in rows], rows, left_out)


def _texts(
    setting: Setting,
    family: dict[str, str],
    name: str,
    config: dict[str, Any],
    fault: Callable[[], None] | None,
) -> tuple[list[np.ndarray], float]:
    """(`pit.places` of every text, tokens per target step)."""
    count, tokens = (REQUESTS, CONTROL_TOKENS if fault else TOKENS)
    if setting.toy:
        count, tokens = TOY_REQUESTS, TOY_TOKENS
    prompts = [[5 + i % 40, 7, 11] for i in range(count)]
    params = [
        {"temperature": 1, "max_tokens": tokens, "ignore_eos": True, "seed": i}
        for i in range(count)
    ]
    arguments = engines.TINY_ARGS | {
        "model": family["target"],
        "max_num_seqs": count,
        "skip_tokenizer_init": True,
        "speculative_config": config,
    }
    label = f"distribution {name}"
    with engines.engine(setting, label, arguments, prepare=fault) as process:
        found = process.generate(prompts, params)
    paths = family["target"], family["mid"]
    places = placed(paths, setting.device, prompts, found.token_ids)
    return places, found.num_tokens / found.num_target_steps


@torch.inference_mode()
def placed(
    paths: tuple[str, str], device: str, prompts: list[list[int]], texts: list[list[int]]
) -> list[np.ndarray]:
    """`pit.places` of every text at temperature 1.

    Args:
        paths: the target and the model that drafts for it.
    """
    from transformers import AutoModelForCausalLM

    networks: list[Any] = [
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).to(device).eval()
        for path in paths
    ]
    found = []
    for first in range(0, len(texts), AT_ONCE):
        some = range(first, min(first + AT_ONCE, len(texts)))
        ids = torch.tensor([[*prompts[i], *texts[i]] for i in some], device=device)
        start = len(prompts[0])
        rows = [network(ids).logits[:, start - 1 : -1] for network in networks]
        for row, drafter, text in zip(*rows, ids[:, start:], strict=True):
            found.append(pit.places(row, text, drafter))
    return found
