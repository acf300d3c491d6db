"""Table-driven levels, and exact choices in place of the random draws of cascade and engine."""

from collections.abc import Callable
from contextlib import contextmanager
from fractions import Fraction
from unittest import mock

import numpy as np
import torch
from oracle.distributions import chain_distribution, tree_distribution
from oracle.exact import Choices, Distribution, Tokens, distribution_of
from oracle.sequential import argmax

from vllm_hsd.cascade.level import LookupResult
from vllm_hsd.rules.tree import TreeRows
from vllm_hsd.tools.lookup_level import UNLIMITED, LookupLevel

# Rounding errors of float64 must not become branches of their own.
NOTHING = 1e-12


class TableLevel:
    """A model by a table of what follows the prompt.

    It fails if it is told that other tokens than it was fed are in its cache.
    """

    context_length = UNLIMITED

    def __init__(self, table: Callable[[Tokens], tuple], prompt: int):
        self.table, self.prompt = table, prompt
        self.fed: dict[int, list[int]] = {}
        self.known: dict[Tokens, list[float]] = {}

    def begin(self, prompt: list[int]) -> list[int]:
        self.fed.clear()
        return prompt

    def forward(self, tokens, rows, starts, counts, num_logits) -> torch.Tensor:
        logits = []
        for row, start, count, kept in zip(rows, starts, counts, num_logits, strict=True):
            assert 0 <= kept <= count
            text = tokens[row, : start + count].tolist()
            assert text[:start] == self.fed.get(row, [])[:start]
            self.fed[row] = text
            logits += [
                self.row(tuple(text[self.prompt : start + count - back]))
                for back in range(kept - 1, -1, -1)
            ]
        return torch.tensor(logits, dtype=torch.float64).reshape(len(logits), -1)

    def row(self, after_prompt: Tokens) -> list[float]:
        """Logarithms of the distribution there."""
        if after_prompt not in self.known:
            distribution = np.array([float(v) for v in self.table(after_prompt)])
            with np.errstate(divide="ignore"):
                self.known[after_prompt] = np.log(distribution).tolist()
        return self.known[after_prompt]


class TableLookup(LookupLevel):
    """Finds the likeliest token of a table, and after some texts nothing."""

    def __init__(self, table: Callable[[Tokens], tuple], prompt: int):
        self.table, self.prompt = table, prompt

    def lookup(self, texts, requested) -> LookupResult:
        tokens, rows, _, ends = texts
        found = np.zeros((len(rows), int(requested.max(initial=0))), dtype=np.int64)
        counts = np.zeros(len(rows), dtype=np.int64)
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            text = tuple(tokens[row, self.prompt : end].tolist())
            while counts[i] < requested[i] and sum(text) % 3 != 2:
                found[i, counts[i]] = token = argmax(self.table(text))
                text += (token,)
                counts[i] += 1
        return LookupResult(found, counts, np.zeros(found.shape))


def exact_distribution(program: Callable[[], Tokens]) -> Distribution:
    """The distribution of a program's result over all draws of the cascade or engine in it."""

    def chosen(choices: Choices):
        with _drawn_by(choices):
            return program()

    return distribution_of(chosen)


@contextmanager
def _drawn_by(choices: Choices):
    def pick(weights: torch.Tensor) -> int:
        return choices.sample([Fraction(w) if w > NOTHING else 0 for w in weights.tolist()])

    def verify_tree(target, draft, tree, uniforms, *, method):
        assert len(uniforms) == len(tree) + 1
        distribution = tree_distribution(target, draft, tree, method=method)
        end, final = divmod(pick(distribution.flatten()), distribution.shape[1])
        path = TreeRows(target, draft, tree).path_to(end - 1)
        return [*(tree.tokens[n] for n in path), final], path

    def verify_chain(target, draft, token_ids, uniforms, *, method):
        assert len(uniforms) == len(token_ids) + 1
        distribution = chain_distribution(target, draft, token_ids, method=method)
        accepted, final = divmod(pick(distribution.flatten()), distribution.shape[1])
        return [*token_ids[:accepted], final], accepted

    def draw(row, uniform):
        return pick(row / row.sum())

    with (
        mock.patch("vllm_hsd.tools.reference.drafts.verify_chain", verify_chain),
        mock.patch("vllm_hsd.tools.reference.cascade.draw", draw),
        mock.patch("vllm_hsd.tools.reference.engine.verify_tree", verify_tree),
        # draw_iid and draw_without_replacement draw with it.
        mock.patch("vllm_hsd.rules.tree.draw", draw),
    ):
        yield
