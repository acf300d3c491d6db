"""Exact distributions with drafters whose logits are wider or narrower than the target's."""

from unittest import mock

import pytest
import torch
from oracle.exact import Table
from oracle.stand_ins import TableLevel
from oracle.test_cascade_exact import PROMPT, VERIFIERS, bias
from oracle.test_cascade_mutants import ClaimsOwnLevel

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.vocabulary import fit_logits, readable


class PaddedLevel(TableLevel):
    """A drafter of its own vocabulary size."""

    def __init__(self, width: int, vocabulary: int, seed: int = 100):
        super().__init__(Table(width, seed), len(PROMPT))
        self.width, self.vocabulary = width, vocabulary

    def row(self, after_prompt):
        text = readable(torch.tensor(after_prompt, dtype=torch.int64), self.width)
        return fit_logits(torch.tensor(self.own_row(text.tolist())), self.vocabulary).tolist()

    def own_row(self, text) -> list[float]:
        return super().row(tuple(text))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("width", [2, 3, 5])
def test_one_drafter(width, verifier):
    levels = [PaddedLevel(width, 3)]
    assert bias(levels, [LevelOptions(1)], 3, vocabulary=3, verifier=verifier) < 1e-9


@pytest.mark.parametrize("widths", [(1, 4), (4, 1), (4, 3)])
def test_two_drafters(widths):
    levels = [PaddedLevel(width, 2, 100 + k) for k, width in enumerate(widths)]
    assert bias(levels, [LevelOptions(1), LevelOptions(2)], 4) < 1e-9


class FoldsPadding(PaddedLevel):
    """Draws over all its rows and takes tokens beyond the target's for the last one."""

    def row(self, after_prompt):
        own = torch.tensor(self.own_row(after_prompt)).exp()
        folded = own[: self.vocabulary].clone()
        folded[-1] += own[self.vocabulary :].sum()
        return folded.log().tolist()


class ClaimsCutRows(ClaimsOwnLevel):
    """Claims that such tokens were never drawn."""

    def claimed(self, level, text):
        return fit_logits(torch.tensor(self.levels[0].own_row(text)), 2).softmax(-1)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_padding_folded_into_a_token_is_caught(verifier):
    levels, options = [FoldsPadding(4, 2)], [LevelOptions(2, verifier)]
    with mock.patch("vllm_hsd.tools.reference.engine.Cascade", ClaimsCutRows):
        assert bias(levels, options, 4, verifier=verifier) > 1e-3
    assert bias(levels, options, 4, verifier=verifier) < 1e-9
