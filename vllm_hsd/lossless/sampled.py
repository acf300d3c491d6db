"""Sampled text of an engine, and the verdict on it by the same model without speculation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_hsd.engine import EngineProcess
from vllm_hsd.lossless.quantiles import randomized
from vllm_hsd.lossless.statistics import (
    ERROR_PROBABILITY,
    Check,
    adjusted,
    arrange,
    checks_of,
    rare_event_check,
)

# Requests that are handed to an engine at once, in batches: progress is shown between.
_AT_ONCE = 4
# Share of tokens that rounding may move across the border of top-k or top-p, at most.
_ACROSS_BORDER = {"float32": 1e-5}
_ACROSS_BORDER_16_BIT = 1e-2


@dataclass(frozen=True)
class Setting:
    """Sampling parameters that are verified together.

    Attributes:
        temperature: above 0.
        others: further arguments of `vllm.SamplingParams`, such as top_p.
    """

    temperature: float
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        parts = [f"temperature {self.temperature:g}"]
        parts += [f"{key.replace('_', '-')} {value}" for key, value in self.others.items()]
        # Of what is long, a grammar for example, the key only.
        return ", ".join(part if len(part) < 20 else part.split()[0] for part in parts)


@dataclass
class Texts:
    """Generated answers, of all settings in turn.

    Attributes:
        prompts: token ids of every request.
        settings: index of its setting.
        params: its arguments of `vllm.SamplingParams`.
        token_ids: its answer.
        step_lengths: tokens of every step of the answer.
        drafted, accepted: draft tokens of all requests.
    """

    prompts: list[Sequence[int]] = field(default_factory=list)
    settings: list[int] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    step_lengths: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))


def planned(
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Setting],
    num_tokens: int,
    answer_tokens: int,
) -> Texts:
    """Requests of all settings in turn, without answers; every second one has a seed.

    Args:
        num_tokens: tokens of every setting, at least.
        answer_tokens: tokens of every answer.
    """
    texts = Texts()
    for i in range(math.ceil(num_tokens / answer_tokens)):
        for number, setting in enumerate(settings):
            texts.prompts.append(prompts[i % len(prompts)])
            texts.settings.append(number)
            texts.params.append(
                {
                    "temperature": setting.temperature,
                    "max_tokens": answer_tokens,
                    "ignore_eos": True,
                    "seed": len(texts.params) if i % 2 else None,
                    **setting.others,
                }
            )
    return texts


def generate(
    engine: EngineProcess, texts: Texts, batch_size: int, progress: Callable[[str], object]
) -> Texts:
    """Fill in the answers of `texts`; the settings share every batch."""
    total = sum(params["max_tokens"] for params in texts.params)
    for part in _parts(len(texts.prompts), batch_size):
        found = engine.generate(texts.prompts[part], texts.params[part])
        texts.token_ids += found.token_ids
        texts.step_lengths += found.step_lengths
        texts.drafted += found.drafted
        texts.accepted += found.accepted
        progress(f"sampled {texts.num_tokens} of {total} tokens")
    return texts


def scored(
    engine: EngineProcess, texts: Texts, batch_size: int, progress: Callable[[str], object]
) -> list[np.ndarray]:
    """Where every token lies in the distributions of an engine without speculation.

    Returns:
        [tokens, 3] float64 for every answer, see `quantiles.token_ranges`.
    """
    ranges: list[np.ndarray] = []
    for part in _parts(len(texts.prompts), batch_size):
        ranges += engine.call(
            _score, texts.prompts[part], texts.token_ids[part], texts.params[part]
        )
        done = sum(map(len, ranges))
        progress(f"scored {done} of {texts.num_tokens} tokens without speculation")
    return ranges


def checks(
    settings: Sequence[Setting], texts: Texts, ranges: Sequence[np.ndarray], dtype: str, seed: int
) -> list[Check]:
    """All checks of all settings.

    Args:
        ranges: of every answer, from `scored`.
        dtype: of the model.
        seed: of the uniforms that make the quantiles continuous.
    """
    rng = np.random.default_rng(seed)
    rate = _ACROSS_BORDER.get(dtype, _ACROSS_BORDER_16_BIT)
    found: list[Check] = []
    for number, setting in enumerate(settings):
        own = [i for i, owner in enumerate(texts.settings) if owner == number]
        quantiles = [randomized(ranges[i], rng.random((2, len(ranges[i])))) for i in own]
        tokens = arrange(quantiles, [texts.step_lengths[i] for i in own])
        found += checks_of(setting.name, tokens)
        excluded = sum(int((ranges[i][:, 0] == 0).sum()) for i in own)
        found.append(
            rare_event_check(
                setting.name, "only tokens that filters keep", excluded, len(tokens.place), rate
            )
        )
    return found


def failures(found: Sequence[Check]) -> list[Check]:
    """The checks that a lossless engine fulfils but for ERROR_PROBABILITY, and this one did not."""
    p_values = adjusted([check.p_value for check in found])
    return [check for check, p in zip(found, p_values, strict=True) if not p >= ERROR_PROBABILITY]


def _parts(count: int, batch_size: int) -> Iterator[slice]:
    size = _AT_ONCE * batch_size
    for first in range(0, count, size):
        yield slice(first, first + size)


def _score(llm: Any, *args: Any) -> list[np.ndarray]:
    """Runs in the engine's process: the scorer imports vLLM."""
    from vllm_hsd.runner_v1.scorer import score

    return score(llm, *args)
