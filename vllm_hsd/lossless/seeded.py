"""Text of requests with seeds, which is to be that of vLLM without speculation.

vLLM draws a token as the first maximum of logits plus noise, and the noise follows from the seed
and the position. So text with speculation is compared token by token. Logits are rounded otherwise
with speculation: a first difference is accepted only where the perturbed logits of the two tokens
are within rounding, which is where the engine without speculation draws the other token as soon as
that token's logit is raised by the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_hsd.engine import EngineProcess
from vllm_hsd.lossless.sampled import Texts


@dataclass(frozen=True)
class Parting:
    """The first token of an answer that speculation changed.

    Attributes:
        answer: number of the answer.
        place: number of the token in it.
        expected, found: without and with speculation; None where that answer has ended.
        explained: whether rounding can do that.
    """

    answer: int
    place: int
    expected: int | None
    found: int | None
    explained: bool


@dataclass(frozen=True)
class Seeded:
    """What was compared.

    Attributes:
        answers, tokens: how many.
        partings: first differences.
    """

    answers: int
    tokens: int
    partings: list[Parting] = field(default_factory=list)

    @property
    def unexplained(self) -> list[Parting]:
        """Those that rounding cannot explain."""
        return [each for each in self.partings if not each.explained]


def compared(engine: EngineProcess, texts: Texts, bound: float) -> Seeded:
    """Compare seeded answers with those of an engine without speculation.

    Args:
        engine: without speculation, on vLLM's V1 runner.
        texts: answers with speculation; every request has a seed.
        bound: largest gap of two logits, before the temperature, that rounding may exchange.

    Raises:
        UserError: the engine does not run on the V1 runner.
    """
    expected = engine.generate(texts.prompts, texts.params).token_ids
    apart = []
    for i, (ours, theirs) in enumerate(zip(texts.token_ids, expected, strict=True)):
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            place = next((n for n, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            apart.append((i, place))
    tied = [(i, place) for i, place in apart if place < len(texts.token_ids[i])]
    drawn: list[int] = []
    if tied:
        drawn = engine.call(
            _drawn_with_raised,
            [texts.prompts[i] for i, _ in tied],
            [texts.token_ids[i][: place + 1] for i, place in tied],
            [texts.params[i] for i, _ in tied],
            bound,
        )
    explained = {
        i: token == texts.token_ids[i][place] for (i, place), token in zip(tied, drawn, strict=True)
    }
    partings = [
        Parting(
            i,
            place,
            _at(expected[i], place),
            _at(texts.token_ids[i], place),
            explained.get(i, False),
        )
        for i, place in apart
    ]
    return Seeded(len(expected), sum(map(len, expected)), partings)


def _at(token_ids: Sequence[int], place: int) -> int | None:
    return token_ids[place] if place < len(token_ids) else None


def _drawn_with_raised(llm: Any, *args: Any) -> list[int]:
    """Runs in the engine's process: the scorer imports vLLM."""
    from vllm_hsd.lossless.scorer import drawn_with_raised

    return drawn_with_raised(llm, *args)
