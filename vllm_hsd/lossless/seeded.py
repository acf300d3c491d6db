"""Text of requests with seeds, which is to be that of vLLM without speculation.

vLLM draws a token as the first maximum of logits plus noise, and the noise follows from the seed
and the position. So text with speculation is compared token by token. Logits are rounded otherwise
with speculation: a first difference is accepted only where the perturbed logits of the two tokens
are within rounding, which is where the engine without speculation draws the other token as soon as
that token's logit is raised by the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """How many answers and tokens were compared, and their first differences."""

    answers: int
    tokens: int
    partings: list[Parting]

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
    ours, theirs = texts.token_ids, engine.generate(texts.prompts, texts.params).token_ids
    apart = {}
    for i, (own, plain) in enumerate(zip(ours, theirs, strict=True)):
        if own != plain:
            pairs = enumerate(zip(own, plain, strict=False))
            apart[i] = next((n for n, (a, b) in pairs if a != b), min(len(own), len(plain)))
    tied = [i for i, place in apart.items() if place < len(ours[i])]
    drawn: list[int] = []
    if tied:
        drawn = engine.call(
            "vllm_hsd.lossless.scorer:drawn_with_raised",
            [texts.prompts[i] for i in tied],
            [ours[i][: apart[i] + 1] for i in tied],
            [texts.params[i] for i in tied],
            bound,
        )
    explained = {i for i, token in zip(tied, drawn, strict=True) if token == ours[i][apart[i]]}
    partings = []
    for i, n in apart.items():
        expected, found = (ids[i][n] if n < len(ids[i]) else None for ids in (theirs, ours))
        partings.append(Parting(i, n, expected, found, i in explained))
    return Seeded(len(theirs), sum(map(len, theirs)), partings)
