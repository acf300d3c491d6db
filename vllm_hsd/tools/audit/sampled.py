"""Sampled text of an engine, and the verdict on it by the same model without speculation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit import directions
from vllm_hsd.tools.audit.lean import lean_checks
from vllm_hsd.tools.audit.quantiles import FIGURES, TAIL, randomized
from vllm_hsd.tools.audit.servers import Server
from vllm_hsd.tools.audit.statistics import (
    ERROR_PROBABILITY,
    ORDERS,
    Check,
    adjusted,
    arrange,
    checks_of,
    improbable,
    rare_event_check,
    uniform,
)
from vllm_hsd.tools.engine import ADAPTER, EngineProcess, Generation

# Requests that are handed to an engine at once, in batches: progress is shown between.
_AT_ONCE = 4
# Names of the places that a draft reached, and of those after a draft of which everything was
# accepted; tokens there to test them.
DRAFTED, AFTER_DRAFT = "drafted", "after a whole draft"
FEWEST_DRAFTED = 100
# Of answers: rounding moves no end of the same text.
ENDS, _NEVER = "ends as without speculation", 1e-9
# Share of tokens that rounding may move across the border of top-k or top-p, at most.
_ACROSS_BORDER = {"float32": 1e-5}
_ACROSS_BORDER_16_BIT = 1e-2
# Below these it moves more than the checks allow for in 16 bits (logits whose rounding has a
# standard deviation of .12, as of SmolLM2).
_LEAST_16_BIT = {"temperature": 0.1, "top_p": 0.8}

Progress = Callable[[str], object]


def under(name: str, progress: Progress) -> Progress:
    """The progress of a part that has a name."""
    return lambda text: progress(f"{name}: {text}")


@dataclass(frozen=True)
class Setting:
    """Sampling parameters that are verified together.

    Attributes:
        temperature: above 0 where text is scored; at 0 it is greedy, and compared.
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
        names: of the settings.
        prompts: token ids of every request.
        settings: index of its setting.
        params: its arguments of `vllm.SamplingParams`.
        token_ids: its answer.
        step_lengths: tokens of every step of the answer.
        finishes: why it ended, "stop" or "length"; empty for servers.
        drafts, drafted, accepted: drafts of all requests, and their tokens.
        rows: name of a drafter -> [tokens, 2, k] of every answer, see `directions.rows_of`.
        offered: [tokens] bool of every answer, places that a draft reached; None where that is not
            known.
        bonus: [tokens] bool of every answer, places after a whole draft; None as above.
        overrun: answers that end otherwise than without speculation, see `scored`.
    """

    names: list[str] = field(default_factory=list)
    prompts: list[Sequence[int]] = field(default_factory=list)
    settings: list[int] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    step_lengths: list[list[int]] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)
    offered: list[np.ndarray] | None = None
    bonus: list[np.ndarray] | None = None
    overrun: int = 0

    def no_rows(self) -> list[np.ndarray]:
        """Rows of a drafter that drafted nothing."""
        shapes = [(len(ids), 2, directions.ROW_WIDTH) for ids in self.token_ids]
        return [np.full(shape, -1, dtype=np.float32) for shape in shapes]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    def only(self, chosen: Sequence[int]) -> Texts:
        """Some of the answers; how many drafts they had is not known."""
        found = replace(self, drafts=0)
        for name in ("prompts", "settings", "params", "token_ids", "step_lengths", "finishes"):
            if own := getattr(self, name):
                setattr(found, name, [own[i] for i in chosen])
        found.rows = {name: [own[i] for i in chosen] for name, own in self.rows.items()}
        for name in ("offered", "bonus"):
            if (own := getattr(self, name)) is not None:
                setattr(found, name, [own[i] for i in chosen])
        return found

    def end_as(self, lengths: Sequence[int], finishes: Sequence[str]) -> None:
        """Cut the answers to lengths, and count those that end otherwise than `finishes`."""
        for i, length in enumerate(lengths):
            ids = self.token_ids[i]
            self.overrun += len(ids) > length or bool(
                finishes and self.finishes and finishes[i] != self.finishes[i]
            )
            if len(ids) == length:
                continue
            self.token_ids[i] = ids[:length]
            ends = np.minimum(np.cumsum(self.step_lengths[i]), length)
            self.step_lengths[i] = [n for n in np.diff(ends, prepend=0).tolist() if n]
            for own in (self.offered, self.bonus):
                if own is not None:
                    own[i] = own[i][:length]

    @property
    def num_offered(self) -> int:
        """Places that a draft reached, at least.

        Where they are not known: every draft reaches one, and every accepted token was one.
        """
        if self.offered is not None:
            return sum(int(each.sum()) for each in self.offered)
        accepted = self.num_tokens - sum(map(len, self.step_lengths))
        return min(max(self.drafts, accepted), self.num_tokens)

    def offered_in(self, setting: int) -> int:
        """Places of one setting that a draft reached; of what `offered` tells."""
        pairs = zip(self.offered or (), self.settings, strict=True)
        return sum(int(each.sum()) for each, own in pairs if own == setting)

    def parts(self, batch_size: int) -> Iterator[slice]:
        """The requests, as many as are handed to an engine at once."""
        for first in range(0, len(self.prompts), _AT_ONCE * batch_size):
            yield slice(first, first + _AT_ONCE * batch_size)


def merged(parts: Sequence[Texts]) -> Texts:
    """Answers of several rounds of one plan."""
    found = Texts(parts[0].names)
    for name in ("prompts", "settings", "params", "token_ids", "step_lengths", "finishes"):
        setattr(found, name, [each for own in parts for each in getattr(own, name)])
    for name in ("drafts", "drafted", "accepted"):
        setattr(found, name, sum(getattr(own, name) for own in parts))
    names = {name for own in parts for name in own.rows}
    for name in sorted(names):
        found.rows[name] = [row for own in parts for row in own.rows.get(name) or own.no_rows()]
    for name in ("offered", "bonus"):
        if all(getattr(own, name) is not None for own in parts):
            setattr(found, name, [each for own in parts for each in getattr(own, name)])
    return found


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
    texts = Texts([setting.name for setting in settings])
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
            row `texts.rows` does not get that name; `texts.offered` and `texts.bonus` stay None
            where the engine's drafts cannot be followed.
        certain: see `offered.OfferRecorder`.
    """
    total = sum(params["max_tokens"] for params in texts.params)
    recording = None
    if not isinstance(engine, Server):
        wanted = certain if offers is not None else None
        recording = engine if engine.call("vllm_hsd.tools.audit.offered:install", wanted) else None
    rows: list[np.ndarray] = []
    offered: list[np.ndarray] = []
    bonus: list[np.ndarray] = []
    for part in texts.parts(batch_size):
        found = engine.generate(texts.prompts[part], texts.params[part])
        texts.token_ids += found.token_ids
        texts.step_lengths += found.step_lengths
        texts.finishes += found.finishes
        texts.drafts += found.drafts
        texts.drafted += found.drafted
        texts.accepted += found.accepted
        if recording is not None:
            taken = recording.call("vllm_hsd.tools.audit.offered:take")
            for all_own, own in zip((rows, offered, bonus), _offered(taken, found), strict=True):
                all_own += own
        progress(f"sampled {texts.num_tokens} of {total} tokens")
    if offers is not None and any((own[:, 0] >= 0).any() for own in rows):
        texts.rows[offers] = rows
    # A tree of several drawn drafts cannot be followed.
    if any(own.any() for own in offered) or (recording is not None and not texts.drafted):
        texts.offered, texts.bonus = offered, bonus
    return texts


def _offered(
    taken: dict[str, tuple[dict[int, np.ndarray], dict[int, int]]], found: Generation
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """(rows, places that a draft reached, places after a whole draft) of every answer."""
    # vLLM adds a random end to the names.
    named = {int(name.partition("-")[0]): own for name, own in taken.items()}
    rows, reached, bonus = [], [], []
    for i, (token_ids, steps) in enumerate(zip(found.token_ids, found.step_lengths, strict=True)):
        offers, lengths = named.get(i, ({}, {}))
        own = np.full((len(token_ids), 2, directions.ROW_WIDTH), -1, dtype=np.float32)
        for place, row in offers.items():
            if place < len(own):
                own[place] = row
        rows.append(own)
        reached.append(np.zeros(len(own), dtype=bool))
        bonus.append(np.zeros(len(own), dtype=bool))
        starts = np.cumsum([0, *steps])[:-1].tolist()
        for start, count in zip(starts, steps, strict=True):
            if length := lengths.get(start, 0):
                reached[-1][start : start + min(length, count)] = True
                bonus[-1][start + length : start + count] = count == length + 1
    return rows, reached, bonus


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
        # The adapters are the target's.
        {**each, "temperature": each["temperature"] * temperature_scale, ADAPTER: None}
        for each in texts.params
    ]
    likeliest = partial(engine.call, "vllm_hsd.tools.audit.scorer:likeliest")
    rows = texts.rows[name] = []
    for part in texts.parts(batch_size):
        found = likeliest(texts.prompts[part], texts.token_ids[part], params[part])
        for ids, own in zip(texts.token_ids[part], found, strict=True):
            # The drafter may end a text before the target does.
            missing = ((0, len(ids) - len(own)), (0, 0), (0, 0))
            rows.append(np.pad(own, missing, constant_values=-1))
        progress(f"{name}: read {sum(map(len, rows))} of {texts.num_tokens} tokens")


def scored(
    engine: EngineProcess | Server, texts: Texts, batch_size: int, progress: Progress
) -> list[np.ndarray]:
    """Where every token lies in the distributions of an engine or server without speculation.

    An answer that goes on where this engine ends it is cut there, and counted in `texts.overrun`;
    so is one that ends otherwise.

    Returns:
        [tokens, 4 + drafters * directions.WIDTH] float64 for every answer, see
        `quantiles.token_ranges` and `directions.marks`.
    """
    score: Callable[..., tuple[list[np.ndarray], list[str]]]
    if isinstance(engine, Server):
        score = engine.score
    else:
        score = partial(engine.call, "vllm_hsd.tools.audit.scorer:score")
    ranges: list[np.ndarray] = []
    finishes: list[str] = []
    for part in texts.parts(batch_size):
        rows = {name: own[part] for name, own in texts.rows.items()}
        found, ends = score(texts.prompts[part], texts.token_ids[part], texts.params[part], rows)
        ranges += found
        finishes += ends
        done = sum(map(len, ranges))
        progress(f"scored {done} of {texts.num_tokens} tokens without speculation")
    texts.end_as(list(map(len, ranges)), finishes)
    return ranges


def refuse_coarse(dtype: str, settings: Sequence[Setting]) -> None:
    """Raise UserError for settings at which rounding alone would fail the checks."""
    for setting in () if dtype in _ACROSS_BORDER else settings:
        given = {"temperature": setting.temperature, **setting.others}
        for name, least in _LEAST_16_BIT.items():
            if given.get(name, 1.0) < least:
                raise UserError(
                    f"{dtype} rounds too coarsely to judge {name} {given[name]:g}: give --dtype "
                    f"float32, or {least:g} or more."
                )


def checks(texts: Texts, ranges: Sequence[np.ndarray], dtype: str, seed: int) -> list[Check]:
    """All checks of all settings, for a model's dtype.

    Whatever concerns drafts looks at the places that a draft reached. Where those are not known it
    looks at all places, and its power is that of the share that a draft reached at least.

    Args:
        ranges: of every answer, from `scored`.
        seed: of the uniforms that make the quantiles continuous.
    """
    rng = np.random.default_rng(seed)
    rate = _ACROSS_BORDER.get(dtype, _ACROSS_BORDER_16_BIT)
    found: list[Check] = []
    drafters = list(texts.rows)
    share = 1.0 if texts.offered is not None else texts.num_offered / texts.num_tokens
    starts = [FIGURES + k * directions.WIDTH for k in range(len(drafters))]
    orders = [0, 1, 2, *(start + directions.BEFORE for start in starts)]
    for number, name in enumerate(texts.names):
        own = [i for i, owner in enumerate(texts.settings) if owner == number]
        every = np.concatenate([ranges[i] for i in own])
        quantiles = [
            randomized(ranges[i][:, orders], rng.random((len(orders) - 1, len(ranges[i]))))
            for i in own
        ]
        tokens = arrange(quantiles, [texts.step_lengths[i] for i in own])
        reached = None
        if texts.offered is not None:
            reached = np.concatenate([texts.offered[i] for i in own])
            tokens.quantiles[len(ORDERS) :, ~reached] = np.nan
            every[~reached, FIGURES:] = np.nan
        found += checks_of(name, tokens, drafters)
        for drafter, start in zip(drafters, starts, strict=True):
            marks = every[:, start : start + directions.WIDTH]
            found += lean_checks(name, drafter, marks, tokens.labels(), share)
        chosen = {DRAFTED: reached}
        if texts.bonus is not None:
            chosen[AFTER_DRAFT] = np.concatenate([texts.bonus[i] for i in own])
        for place, where in chosen.items():
            if where is not None and where.sum() >= FEWEST_DRAFTED:
                for order, each in zip(ORDERS, tokens.quantiles, strict=False):
                    found.append(uniform(name, order, place, each[where]))
        excluded, kept = int((every[:, 0] == 0).sum()), "only tokens that filters keep"
        found.append(rare_event_check(name, kept, excluded, len(tokens.place), rate))
        tails = every[every[:, 0] > 0, TAIL]
        found.append(improbable(name, tails, dtype in _ACROSS_BORDER))
    if texts.finishes:
        found.append(rare_event_check(texts.names[0], ENDS, texts.overrun, len(ranges), _NEVER))
    return found


def failures(found: Sequence[Check]) -> list[Check]:
    """The checks that a lossless engine fulfils but for ERROR_PROBABILITY, and this one did not."""
    p_values = adjusted([check.p_value for check in found])
    return [check for check, p in zip(found, p_values, strict=True) if not p >= ERROR_PROBABILITY]
