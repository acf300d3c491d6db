"""Greedy text and text of requests with seeds, which is to be that of vLLM without speculation.

vLLM draws a token as the first maximum of logits plus noise, and the noise follows from the seed
and the position. So text with speculation is compared token by token. Logits are rounded otherwise
with speculation: a first difference is accepted only where the (perturbed) logits of the two tokens
are within rounding, which is where the engine without speculation draws the other token as soon as
that token's logit is raised by the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_hsd.tools.audit.sampled import Texts
from vllm_hsd.tools.audit.servers import Server
from vllm_hsd.tools.engine import EngineProcess

_SCORER = "vllm_hsd.tools.audit.scorer"


@dataclass(frozen=True)
class Parting:
    """The first token of an answer that speculation changed.

    Attributes:
        answer: number of the answer.
        place: number of the token in it.
        expected, found: without and with speculation; None where that answer has ended.
        explained: whether rounding can do that.
        gap: of a greedy answer, by how much the token falls short of the likeliest one, in nats;
            None where that is not known.
    """

    answer: int
    place: int
    expected: int | None
    found: int | None
    explained: bool
    gap: float | None = None


@dataclass(frozen=True)
class Seeded:
    """How many answers and tokens were compared, and their first differences."""

    answers: int
    tokens: int
    partings: list[Parting]

    @property
    def unexplained(self) -> list[Parting]:
        """Those that rounding cannot explain."""
        return [each for each in self.partings if not each.explained]


def compared(engine: EngineProcess | Server, texts: Texts, bound: float) -> Seeded:
    """Compare answers with those of an engine without speculation.

    Args:
        engine: without speculation, on vLLM's V2 runner.
        texts: answers with speculation; every request is greedy or has a seed.
        bound: largest gap of two logits, before the temperature, that rounding may exchange.

    Raises:
        UserError: the engine does not run on the V2 runner.
    """
    plain = engine.generate(texts.prompts, texts.params)
    ours, theirs = texts.token_ids, plain.token_ids
    apart = {}
    for i, (ids, other) in enumerate(zip(ours, theirs, strict=True)):
        if ids != other:
            pairs = enumerate(zip(ids, other, strict=False))
            apart[i] = next((n for n, (a, b) in pairs if a != b), min(len(ids), len(other)))
        elif texts.finishes and plain.finishes and texts.finishes[i] != plain.finishes[i]:
            apart[i] = len(ids)
    tied = [i for i, n in apart.items() if n < min(len(ours[i]), len(theirs[i]))]
    greedy = [i for i in tied if texts.params[i]["temperature"] == 0]
    gaps: list[float] = []
    if isinstance(engine, Server):
        places = [
            ([*texts.prompts[i], *ours[i][: apart[i]]], theirs[i][apart[i]], ours[i][apart[i]])
            for i in greedy
        ]
        gaps = engine.gaps(places)
    elif greedy:
        gaps = engine.call(f"{_SCORER}:shortfalls", *_until(texts, apart, greedy))
    short = dict(zip(greedy, gaps, strict=True))
    explained = {i for i, gap in short.items() if gap <= bound}
    noisy = [i for i in tied if texts.params[i]["temperature"] > 0]
    if noisy and not isinstance(engine, Server):
        drawn = engine.call(f"{_SCORER}:drawn_with_raised", *_until(texts, apart, noisy), bound)
        found = dict(zip(noisy, drawn, strict=True))
        explained |= {i for i, token in found.items() if token == ours[i][apart[i]]}
    partings = []
    for i, n in apart.items():
        expected, own = (ids[i][n] if n < len(ids[i]) else None for ids in (theirs, ours))
        gap = short[i] if math.isfinite(short.get(i, math.inf)) else None
        partings.append(Parting(i, n, expected, own, i in explained, gap))
    # Nothing after a parting is looked at.
    looked_at = (apart[i] + 1 if i in apart else len(ids) for i, ids in enumerate(theirs))
    return Seeded(len(theirs), sum(looked_at), partings)


def _until(
    texts: Texts, apart: Mapping[int, int], chosen: Sequence[int]
) -> tuple[list, list, list]:
    """(prompts, answers up to and with the place where they part, parameters)."""
    answers = [texts.token_ids[i][: apart[i] + 1] for i in chosen]
    return [texts.prompts[i] for i in chosen], answers, [texts.params[i] for i in chosen]
