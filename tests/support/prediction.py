"""A predicted text as a source, in plain numpy: the rule of `cascade.prediction_lookup`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vllm_hsd.cascade.prediction_lookup import DOUBT, LONGEST


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

    def draft(self, text: np.ndarray, committed: int, most: int) -> tuple[list[int], float]:
        """What follows in the prediction, and how sure each token is of it.

        Remembers where a committed text stands: what is drafted above it may be refused.
        """
        matched, place = self.find(text)
        if matched and len(text) == committed:
            self.place, self.at = place, len(text)
        draft = self.tokens[place : place + most] if matched else self.tokens[:0]
        return draft.tolist(), matched / (matched + DOUBT)

    def _rank(self, place: int, length: int) -> int:
        if place == self.place + length - self.at:
            return 0
        if place >= self.place:
            return 1 + place - self.place
        return 2 + len(self.tokens) + self.place - place
