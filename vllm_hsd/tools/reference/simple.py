"""A cascade of any depth for one request, in plain torch: the algorithm, to be read.

`tools.reference.cascade` does the same for ragged batches with caches, early stopping and eos; on
equal uniforms both give the same tokens (`tests/tools/reference/test_simple.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Text = list[int]


@dataclass
class SimpleCascade:
    """Models, cheapest first; the last one is the target, whose distribution the text keeps.

    Attributes:
        models: each maps n tokens to [n, V] float64, its distribution after each of them.
        lengths: most tokens that each model but the target drafts for the next one.
        interleaved: models that verify nothing and add a token to each draft from below.
        uniforms: (model, count) -> that many numbers in [0, 1), never the same one twice.
    """

    models: Sequence[Callable[[Text], torch.Tensor]]
    lengths: Sequence[int]
    uniforms: Callable[[int, int], Sequence[float]]
    interleaved: frozenset[int] = frozenset()

    def generate(self, text: Text, count: int) -> Text:
        """`count` tokens after `text`."""
        end, target = len(text) + count, len(self.models) - 1
        while len(text) < end:
            # The target adds a token of its own to every draft.
            most = min(self.lengths[-1], end - len(text) - 1)
            text = text + self.verify(target, text, *self.draft(target - 1, text, most))[0]
        return text[-count:]

    def draft(self, k: int, text: Text, length: int) -> tuple[Text, list[torch.Tensor]]:
        """`length` tokens of model k after `text`, each with the distribution it was drawn from."""
        tokens: Text = []
        rows: list[torch.Tensor] = []
        if k == 0:
            for u in self.uniforms(0, length):
                rows.append(self.models[0](text + tokens)[-1])
                tokens.append(_draw(rows[-1], u))
            return tokens, rows
        while len(tokens) < length:
            so_far = text + tokens
            below = self.draft(k - 1, so_far, min(self.lengths[k - 1], length - len(tokens) - 1))
            if k in self.interleaved:
                row = self.models[k](so_far + below[0])[-1]
                kept, own_rows = [*below[0], _draw(row, *self.uniforms(k, 1))], [*below[1], row]
            else:
                kept, own_rows = self.verify(k, so_far, *below)
            tokens, rows = tokens + kept, rows + own_rows
        return tokens, rows

    def verify(
        self, k: int, text: Text, x: Text, q: list[torch.Tensor]
    ) -> tuple[Text, list[torch.Tensor]]:
        """Block verification: the accepted prefix of x, drawn from q, and the token after it.

        Each with model k's distribution there: it is a sample of that, whatever q was.
        """
        p = self.models[k](text + x)[len(text) - 1 :]
        next_u, *us = self.uniforms(k, len(x) + 1)
        a, accepted, rest = 1.0, 0, p[0]
        if x:
            rest = (p[0] - q[0]).clamp(min=0)
        for t, u in enumerate(us, 1):
            a = min(1.0, a * float(p[t - 1][x[t - 1]] / q[t - 1][x[t - 1]]))
            h, residual = a, p[t]
            if t < len(x):
                residual = (a * p[t] - q[t]).clamp(min=0)
                mass = float(residual.sum())
                h = 1.0 if a == 1 else mass / (mass + 1 - a)
            if u < h:
                accepted, rest = t, residual
        return [*x[:accepted], _draw(rest, next_u)], list(p[: accepted + 1])


def _draw(row: torch.Tensor, u: float) -> int:
    """The token at quantile u of an unnormalized row."""
    return int(torch.searchsorted(row.cumsum(0), u * row.sum(), right=True))
