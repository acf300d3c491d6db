"""Levels as programs run them, their options, which draft in a step, and what lookups find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Acceptance of the first looked-up token and of each later one, before anything is seen of a text.
_NGRAM_FIRST, _NGRAM_LATER = 0.25, 0.8


@dataclass
class LookupResult:
    """What a lookup found for a batch of requests.

    Attributes:
        token_ids: [batch, width] int64.
        counts: [batch] int64, how many of them hold.
        confidence: [batch, width] float64, estimated probability that the text continues with the
            draft up to and including each token.
    """

    token_ids: np.ndarray
    counts: np.ndarray
    confidence: np.ndarray

    @classmethod
    def empty(cls, batch: int, width: int) -> LookupResult:
        """Nothing found yet, of at most `width` tokens."""
        shape = batch, width
        return cls(np.zeros(shape, np.int64), np.zeros(batch, np.int64), np.zeros(shape))

    @property
    def estimates(self) -> np.ndarray:
        """[batch, width] float64, of each token after the ones before."""
        return of_each_token(self.confidence)

    def put(self, i: int, token_ids: Sequence[int] | np.ndarray, confidence: np.ndarray) -> None:
        """Set what was found for request i: [n] each."""
        count = len(confidence)
        self.counts[i] = count
        self.token_ids[i, :count], self.confidence[i, :count] = token_ids, confidence


def of_each_token(confidence: np.ndarray) -> np.ndarray:
    """Of each token after the ones before, from `LookupResult.confidence`: [..., width] both."""
    found = confidence.copy()
    before = confidence[..., :-1]
    np.divide(confidence[..., 1:], before, out=found[..., 1:], where=before > 0)
    return found


def ngram_confidence(width: int) -> np.ndarray:
    """[width] float64, `LookupResult.confidence` of what follows a repeated n-gram."""
    found: np.ndarray = _NGRAM_FIRST * _NGRAM_LATER ** np.arange(width)
    return found


@dataclass(frozen=True)
class StepLevels:
    """Levels that draft in a step, cheapest first, and the draft length of each; none: no draft.

    `most` is how many tokens each request of the step drafts at most, [n] int64; None for no limit
    but the draft length.
    """

    levels: tuple[int, ...] = ()
    draft_lengths: tuple[int, ...] = ()
    most: np.ndarray | None = None

    @property
    def top(self) -> int:
        """The level whose drafts the target verifies; 0 where there are none."""
        return self.levels[-1] if self.levels else 0

    def below(self, level: int) -> tuple[int, int]:
        """The level that drafts for `level` and its draft length; 0 tokens where none is left."""
        place = self.levels.index(level)
        return (self.levels[place - 1], self.draft_lengths[place - 1]) if place else (level - 1, 0)


@dataclass(frozen=True)
class DraftingLevel:
    """What the budget is told of a level.

    Attributes:
        longest: most tokens of its drafts for the target.
        passed_on: most tokens of its drafts for levels above.
        looks_up: level 0 is a lookup, whose drafts take their time whatever their length.
        verifies: it can verify the levels below it.
        ends: its drafts for the target are asked to go on after each pass.
    """

    longest: int
    passed_on: int
    looks_up: bool = False
    verifies: bool = False
    ends: bool = False


@dataclass
class LevelOptions:
    """How one level takes part in a cascade.

    Attributes:
        draft_length: most tokens proposed to the level above per call.
        verifier: "block" or "standard", how it verifies the level below; "none" to add a token to
            each of its drafts, unverified.
        max_rounds: most drafts taken from below per call; None until the draft is full.
        stopping: "fixed", or "entropy" to stop after a token drawn from an uncertain distribution;
            a level above another one stops after a round that shows such a distribution.
        temperature_scale: factor on the request's temperature for this level.
    """

    draft_length: int
    verifier: str = "block"
    max_rounds: int | None = None
    stopping: str = "fixed"
    temperature_scale: float = 1.0


@dataclass(frozen=True)
class Level:
    """A level as a `program.Program` runs it.

    Attributes:
        runs: a `program.ProgramLevel`; a `program.ProgramLookup` where the schedule says so.
        verifier, max_rounds: see `LevelOptions`; the first level verifies nothing.
    """

    runs: Any
    verifier: str = "block"
    max_rounds: int | None = None
