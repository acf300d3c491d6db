"""Sampled text of an engine, and the verdict on it by the same model without speculation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from vllm_hsd.engine import EngineProcess, Generation
from vllm_hsd.lossless import directions
from vllm_hsd.lossless.lean import lean_checks
from vllm_hsd.lossless.quantiles import randomized
from vllm_hsd.lossless.servers import Server
from vllm_hsd.lossless.statistics import (
    ERROR_PROBABILITY,
    ORDERS,
    Check,
    adjusted,
    arrange,
    checks_of,
    rare_event_check,
    uniform,
)

# Requests that are handed to an engine at once, in batches: progress is shown between.
_AT_ONCE = 4
# Name of the places after a draft of which everything was accepted, and tokens there to test them.
AFTER_DRAFT = "after a whole draft"
_FEWEST_BONUS = 100
# Share of tokens that rounding may move across the border of top-k or top-p, at most.
_ACROSS_BORDER = {"float32": 1e-5}
_ACROSS_BORDER_16_BIT = 1e-2

Progress = Callable[[str], object]


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
        rows: name of a drafter -> [tokens, 2, k] of every answer, see `directions.rows_of`.
        bonus: places of every answer that follow a whole draft; None where that is not known.
    """

    prompts: list[Sequence[int]] = field(default_factory=list)
    settings: list[int] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    step_lengths: list[list[int]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)
    bonus: list[list[int]] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def parts(self, batch_size: int) -> Iterator[slice]:
        """The requests, as many as are handed to an engine at once."""
        for first in range(0, len(self.prompts), _AT_ONCE * batch_size):
            yield slice(first, first + _AT_ONCE * batch_size)


def planned(
    prompts: Sequence[Sequence[int]],
    settings: Sequence[Setting],
    num_tokens: int,
    answer_tokens: int,
    seeded: int = 2,
) -> Texts:
    """Requests of all settings in turn, without answers.

    Args:
        num_tokens: tokens of every setting, at least.
        answer_tokens: tokens of every answer.
        seeded: one request in so many has a seed; 0 for none.
    """
    texts = Texts()
    for i in range(math.ceil(num_tokens / answer_tokens)):
        for number, setting in enumerate(settings):
            has_seed = seeded and (i + 1) % seeded == 0
            texts.prompts.append(prompts[i % len(prompts)])
            texts.settings.append(number)
            texts.params.append(
                {
                    "temperature": setting.temperature,
                    "max_tokens": answer_tokens,
                    "ignore_eos": True,
                    "seed": len(texts.params) if has_seed else None,
                    **setting.others,
                }
            )
    return texts


def generate(
    engine: EngineProcess | Server,
    texts: Texts,
    batch_size: int,
    progress: Progress,
    offers: str | None = None,
    certain: bool = False,
) -> Texts:
    """Fill in the answers of `texts`; the settings share every batch.

    Args:
        offers: name of the drafter whose distributions are recorded, None for none. Without any
            row `texts.rows` does not get that name; `texts.bonus` stays None where the engine's
            drafts cannot be followed.
        certain: see `offered.OfferRecorder`.
    """
    total = sum(params["max_tokens"] for params in texts.params)
    recording = None
    if offers is not None and not isinstance(engine, Server):
        recording = engine if engine.call("vllm_hsd.lossless.offered:install", certain) else None
    rows: list[np.ndarray] = []
    for part in texts.parts(batch_size):
        found = engine.generate(texts.prompts[part], texts.params[part])
        texts.token_ids += found.token_ids
        texts.step_lengths += found.step_lengths
        texts.drafted += found.drafted
        texts.accepted += found.accepted
        if recording is not None:
            new, bonus = _offered(recording.call("vllm_hsd.lossless.offered:take"), found)
            rows += new
            texts.bonus = (texts.bonus or []) + bonus
        progress(f"sampled {texts.num_tokens} of {total} tokens")
    if offers is not None and any((own[:, 0] >= 0).any() for own in rows):
        texts.rows[offers] = rows
    return texts


def _offered(
    taken: dict[str, tuple[dict[int, np.ndarray], dict[int, int]]], found: Generation
) -> tuple[list[np.ndarray], list[list[int]]]:
    """(rows, places after a whole draft) of every answer."""
    # vLLM adds a random end to the names.
    named = {int(name.partition("-")[0]): own for name, own in taken.items()}
    rows, bonus = [], []
    for i, (token_ids, steps) in enumerate(zip(found.token_ids, found.step_lengths, strict=True)):
        offers, lengths = named.get(i, ({}, {}))
        own = np.full((len(token_ids), 2, directions.ROW_WIDTH), -1, dtype=np.float32)
        for place, row in offers.items():
            if place < len(own):
                own[place] = row
        rows.append(own)
        starts = np.cumsum([0, *steps])[:-1].tolist()
        bonus.append(
            [
                start + lengths[start]
                for start, count in zip(starts, steps, strict=True)
                if lengths.get(start) and count == lengths[start] + 1
            ]
        )
    return rows, bonus


def add_drafter(
    engine: EngineProcess,
    texts: Texts,
    name: str,
    temperature_scale: float,
    batch_size: int,
    progress: Progress,
) -> None:
    """Fill in the rows of a drafter, served by an engine of its own at scaled temperatures."""
    params = [
        {**each, "temperature": each["temperature"] * temperature_scale} for each in texts.params
    ]
    likeliest = partial(engine.call, "vllm_hsd.lossless.scorer:likeliest")
    rows = texts.rows[name] = []
    for part in texts.parts(batch_size):
        rows += likeliest(texts.prompts[part], texts.token_ids[part], params[part])
        progress(f"{name}: read {sum(map(len, rows))} of {texts.num_tokens} tokens")


def scored(
    engine: EngineProcess | Server, texts: Texts, batch_size: int, progress: Progress
) -> list[np.ndarray]:
    """Where every token lies in the distributions of an engine or server without speculation.

    Returns:
        [tokens, 3 + drafters * directions.WIDTH] float64 for every answer, see
        `quantiles.token_ranges` and `directions.marks`.
    """
    score: Callable[..., list[np.ndarray]]
    if isinstance(engine, Server):
        score = engine.score
    else:
        score = partial(engine.call, "vllm_hsd.lossless.scorer:score")
    ranges: list[np.ndarray] = []
    for part in texts.parts(batch_size):
        rows = {name: own[part] for name, own in texts.rows.items()}
        ranges += score(texts.prompts[part], texts.token_ids[part], texts.params[part], rows)
        done = sum(map(len, ranges))
        progress(f"scored {done} of {texts.num_tokens} tokens without speculation")
    return ranges


def checks(
    settings: Sequence[Setting], texts: Texts, ranges: Sequence[np.ndarray], dtype: str, seed: int
) -> list[Check]:
    """All checks of all settings, for a model's dtype.

    Args:
        ranges: of every answer, from `scored`.
        seed: of the uniforms that make the quantiles continuous.
    """
    rng = np.random.default_rng(seed)
    rate = _ACROSS_BORDER.get(dtype, _ACROSS_BORDER_16_BIT)
    found: list[Check] = []
    drafters = list(texts.rows)
    starts = [3 + k * directions.WIDTH for k in range(len(drafters))]
    orders = [0, 1, 2, *(start + directions.BEFORE for start in starts)]
    for number, setting in enumerate(settings):
        own = [i for i, owner in enumerate(texts.settings) if owner == number]
        every = np.concatenate([ranges[i] for i in own])
        quantiles = [
            randomized(ranges[i][:, orders], rng.random((len(orders) - 1, len(ranges[i]))))
            for i in own
        ]
        tokens = arrange(quantiles, [texts.step_lengths[i] for i in own])
        found += checks_of(setting.name, tokens, drafters)
        for name, start in zip(drafters, starts, strict=True):
            marks = every[:, start : start + directions.WIDTH]
            found += lean_checks(setting.name, name, marks, tokens.labels())
        if texts.bonus is not None:
            ends = np.concatenate([np.isin(np.arange(len(ranges[i])), texts.bonus[i]) for i in own])
            if ends.sum() >= _FEWEST_BONUS:
                for order, each in zip(ORDERS, tokens.quantiles, strict=False):
                    found.append(uniform(setting.name, order, AFTER_DRAFT, each[ends]))
        excluded, kept = int((every[:, 0] == 0).sum()), "only tokens that filters keep"
        found.append(rare_event_check(setting.name, kept, excluded, len(tokens.place), rate))
    return found


def failures(found: Sequence[Check]) -> list[Check]:
    """The checks that a lossless engine fulfils but for ERROR_PROBABILITY, and this one did not."""
    p_values = adjusted([check.p_value for check in found])
    return [check for check, p in zip(found, p_values, strict=True) if not p >= ERROR_PROBABILITY]
