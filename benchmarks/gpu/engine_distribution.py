"""Text of whole engines against the target's distribution, by transformers in float64.

In one control the verifier is told another temperature of the drafts than they were drawn at, in
the other one it accepts by a ratio that is slightly too large.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import engines, pit
from benchmarks.gpu.faults import install, install_generous
from benchmarks.gpu.items import Finding, Setting

# 256 requests of 800 tokens are 200,000; the controls get 65,536.
REQUESTS, TOKENS, CONTROL_TOKENS = 256, 800, 256
TOY_REQUESTS, TOY_TOKENS = 6, 24
# Tokens per step, below which drafts were hardly verified.
LEAST_RATE = 1.2
# In which an engine is up on a machine with cold caches, has written its texts and they are read.
SECONDS = 80
# Texts that transformers reads at once.
AT_ONCE = 8


def configurations(family: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Speculative configurations by name, all with mid on top; the first is also the controls'.

    All requests run at once, so their number must be one that drafts.
    """
    small, mid = {"model": family["small"]}, {"model": family["mid"]}
    lookup = {"ngram": {"max": 3}, "num_tokens": 1}
    suffix = {"suffix": {"min_acceptance": 0.01, "shared_tokens": 1000}}
    sources = {"sources": [{"ngram": {"max": 3}}, suffix], "num_tokens": 2}
    # On a CPU, where `adaptive` is the default, what does not pay would not be drafted.
    drafting = {"disable_by_batch_size": REQUESTS, "adaptive": False}
    return {
        "two levels": engines.cascade(5, small | {"num_tokens": 2}, mid, **drafting),
        "three levels": engines.cascade(5, lookup, small | {"num_tokens": 2}, mid, **drafting),
        "suffix below mid": engines.cascade(5, suffix | {"num_tokens": 2}, mid, **drafting),
        "sources below mid": engines.cascade(5, sources, mid, **drafting),
        "vLLM's drafter, our verifier": engines.draft_model(family["mid"], 4, "hierarchical"),
    }


def run(setting: Setting, family: dict[str, str] = engines.TINY) -> Finding:
    """Every configuration's text against the target's distribution; the controls' must differ.

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
    rows, waiting = [], []
    for name, fault in faults.items():
        config = configs[name.partition(",")[0] if fault else name]
        part = setting.part(name, partial(_row, setting, family, name, config, fault), SECONDS)
        if part is None:
            waiting.append(name)
        else:
            rows.append(part)
    lines = [pit.sentence(row, row["configuration"]) for row in rows]
    return Finding(lines, rows, waiting=waiting)


def requests(count: int, tokens: int) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """(prompts, sampling parameters). None has a seed: of such a request drafts change nothing."""
    prompts = [[5 + i % 40, 7, 11] for i in range(count)]
    return prompts, [{"temperature": 1, "max_tokens": tokens, "ignore_eos": True}] * count


def _row(
    setting: Setting,
    family: dict[str, str],
    name: str,
    config: dict[str, Any],
    fault: Callable[[], None] | None,
) -> dict[str, Any]:
    """Of the table: an engine's text against the target's distribution."""
    count, tokens = (REQUESTS, CONTROL_TOKENS if fault else TOKENS)
    if setting.toy:
        count, tokens = TOY_REQUESTS, TOY_TOKENS
    prompts, params = requests(count, tokens)
    arguments = engines.TINY_ARGS | {
        "model": family["target"],
        "max_num_seqs": count,
        "skip_tokenizer_init": True,
        "speculative_config": config,
    }
    label = f"distribution {name}"
    with engines.engine(setting, label, arguments, prepare=fault) as process:
        found = process.generate(prompts, params)
    rate = found.num_tokens / found.num_target_steps
    if not found.drafted or (rate < LEAST_RATE and not setting.toy):
        pytest.fail(
            f"{name}: {found.drafted} tokens drafted, {rate:.2f} per step: too few to tell."
        )
    paths = family["target"], family["mid"]
    places = placed(paths, setting.device, prompts, found.token_ids)
    # A few tokens cannot show a bias that strongly.
    rejected = None if setting.toy else pit.REJECTED
    return pit.checked_row("configuration", name, places, rate, fault is not None, rejected)


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
