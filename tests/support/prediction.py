"""A predicted text as a source, in plain numpy: the rule of `cascade.prediction_lookup`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_hsd.cascade.level import LookupResult
from vllm_hsd.cascade.prediction_lookup import DOUBT, LONGEST
from vllm_hsd.tools.lookup_level import Texts


@dataclass
class Prediction:
    tokens: np.ndarray
    begin: int  # tokens of the prompt
    place: int = 0  # the last one
    at: int = 0  # tokens of the text when it was found

    def __post_init__(self) -> None:
        self.at = self.begin

    def find(self, text: np.ndarray) -> tuple[int, int]:
        """(tokens of the longest match, 0 for none; the place in the prediction after it)."""
        answer = text[self.begin :][::-1][:LONGEST]
        best, found = (0, 0), 0
        for place in range(1, len(self.tokens) + 1):
            before = self.tokens[:place][::-1][:LONGEST]
            size = min(len(answer), len(before))
            same = answer[:size] == before[:size]
            matched = size if same.all() else int(same.argmin())
            if matched and (matched, -self._rank(place, len(text))) > best:
                best, found = (matched, -self._rank(place, len(text))), place
        return best[0], found

    def _rank(self, place: int, length: int) -> int:
        if place == self.place + length - self.at:
            return 0
        if place >= self.place:
            return 1 + place - self.place
        return 2 + len(self.tokens) + self.place - place


class PredictionLevel:
    """Drafts the continuation of each request's prediction; nothing without one."""

    def __init__(self) -> None:
        self.predictions: dict[int, Prediction] = {}  # by slot
        self.committed: dict[int, int] = {}

    def read(self, texts: Texts) -> None:
        """Note how long the committed texts are."""
        self.committed.update(zip(texts.slots.tolist(), texts.ends.tolist(), strict=True))

    def lookup(self, texts: Texts, requested: np.ndarray) -> LookupResult:
        """Draft what follows in each prediction, and remember where a committed text stands."""
        result = LookupResult.empty(len(requested), int(requested.max(initial=0)))
        for i in np.flatnonzero(requested):
            slot, end = int(texts.slots[i]), int(texts.ends[i])
            if (known := self.predictions.get(slot)) is None:
                continue
            matched, place = known.find(texts.tokens[texts.rows[i], :end])
            if not matched:
                continue
            # What is drafted above the committed text may be refused.
            if end == self.committed.get(slot):
                known.place, known.at = place, end
            draft = known.tokens[place : place + int(requested[i])]
            each = np.full(len(draft), matched / (matched + DOUBT))
            result.put(i, draft, np.cumprod(each))
        return result
