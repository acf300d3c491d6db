"""Text of whole engines against the target's distribution, by transformers in float64.

In the control the verifier is told another temperature of the drafts than they were drawn at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.gpu import engines, pit, wrong_draft_temperature
from benchmarks.gpu.items import Finding, Setting

# 256 requests of 800 tokens are 200,000; the control needs fewer.
REQUESTS, TOKENS, CONTROL_TOKENS = 256, 800, 200
TOY_REQUESTS, TOY_TOKENS, TOY_GRID = 6, 24, 3
# Texts that transformers reads at once.
AT_ONCE = 8


def configurations(family: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Speculative configurations by name; the first is also the control's."""
    small, mid = {"model": family["small"]}, {"model": family["mid"]}
    lookup = {"ngram": {"max": 3}, "num_tokens": 1}
    return {
        "two levels": engines.cascade(5, small | {"num_tokens": 2}, mid),
        "three levels": engines.cascade(5, lookup, small | {"num_tokens": 2}, mid),
        "vLLM's drafter, our verifier": engines.draft_model(family["mid"], 4, "hierarchical"),
    }


def run(setting: Setting, family: dict[str, str] = engines.TINY) -> Finding:
    """See the module.

    Args:
        family: directories of target, mid and small.

    Raises:
        CheckFailed: the text does not follow the target, or the control is not noticed.
    """
    engines.require_vllm()
    configs = configurations(family)
    cases = [(name, config, False) for name, config in configs.items()]
    cases.insert(1, ("two levels", configs["two levels"], True))
    rows, left_out = [], []
    for name, config, biased in cases:
        if setting.time_left() < engines.ENGINE_SECONDS:
            left_out.append(f"{name}: no time left.")
            continue
        values, rate = _texts(setting, family["target"], name, config, biased)
        grid = TOY_GRID if setting.toy else pit.GRID
        # A few tokens cannot show a bias that strongly.
        rejected = None if setting.toy else pit.REJECTED
        rows.append(pit.checked_row("configuration", name, values, rate, grid, biased, rejected))
    return Finding([pit.sentence(row, row["configuration"]) for row in rows], rows, left_out)


def _texts(
    setting: Setting, target: str, name: str, config: dict[str, Any], biased: bool
) -> tuple[list[np.ndarray], float]:
    """(transformed values of every text, tokens per target step)."""
    count, tokens = (REQUESTS, CONTROL_TOKENS if biased else TOKENS)
    if setting.toy:
        count, tokens = TOY_REQUESTS, TOY_TOKENS
    prompts = [[5 + i % 40, 7, 11] for i in range(count)]
    params = [
        {"temperature": 1, "max_tokens": tokens, "ignore_eos": True, "seed": i}
        for i in range(count)
    ]
    arguments = engines.TINY_ARGS | {
        "model": target,
        "max_num_seqs": count,
        "skip_tokenizer_init": True,
        "speculative_config": config,
    }
    label = f"distribution {name}{' control' if biased else ''}"
    prepare = wrong_draft_temperature.install if biased else None
    with engines.engine(setting, label, arguments, prepare=prepare) as process:
        found = process.generate(prompts, params)
    values = transformed(target, setting.device, prompts, found.token_ids)
    return values, found.num_tokens / found.num_target_steps


@torch.inference_mode()
def transformed(
    target: str, device: str, prompts: list[list[int]], texts: list[list[int]]
) -> list[np.ndarray]:
    """Values of the transform for every text under the target at temperature 1."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
    network = network.to(device).eval()
    g = torch.Generator().manual_seed(0)
    values = []
    for first in range(0, len(texts), AT_ONCE):
        some = range(first, min(first + AT_ONCE, len(texts)))
        ids = torch.tensor([[*prompts[i], *texts[i]] for i in some], device=device)
        start = len(prompts[0])
        logits = network(ids).logits[:, start - 1 : -1]
        for row, text in zip(logits, ids[:, start:], strict=True):
            values.append(pit.transformed(row, text, g).numpy())
    return values
