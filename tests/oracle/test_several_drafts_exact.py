"""Exact distribution of generations where a model draws several drafts for one verification.

The real cascade and `verify_rows`, in the reference engine; every draw is enumerated.
"""

from unittest import mock

import numpy as np
import pytest
from oracle.exact import Table
from oracle.stand_ins import TableLevel
from oracle.test_cascade_exact import PROMPT, VERIFIERS, bias, model

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.rules.branches import verify_rows
from vllm_hsd.tools.reference import ReferenceEngine
from vllm_hsd.tools.reference.several_drafts import SeveralDrafts


def several(length: int, count: int, tokens: int, verifier="block", **settings) -> float:
    options = [LevelOptions(length, verifier)]
    vocabulary = settings.get("vocabulary", 2)
    level = model(vocabulary, 100)
    return bias([level], options, tokens, verifier=verifier, branches=count, **settings)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    ("length", "count", "tokens", "settings"),
    [
        (2, 2, 3, {}),
        (1, 3, 3, {}),
        (1, 2, 2, {"vocabulary": 3, "power": 2}),
        # Rows end with the token that ends the text.
        (2, 2, 3, {"eos": 1}),
        pytest.param(2, 2, 4, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, 3, {"vocabulary": 3}, marks=pytest.mark.slow),
    ],
)
def test_generations_follow_the_target(verifier, length, count, tokens, settings):
    assert several(length, count, tokens, verifier, **settings) < 1e-9


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_rows_may_end_by_what_was_drawn_before_them(verifier):
    """As where a scheduler keeps so many tokens of all rows, and earlier ones end with eos."""

    class Cut(SeveralDrafts):
        def draft(self, batch, slots, requested, verifier):
            super().draft(batch, slots, requested, verifier)
            counts, chain = self.branches.counts, self.drafts
            counts[0, 0] = min(counts[0, 0], chain.token_ids[0, : chain.counts[0]].sum())

    class OneNewToken(SeveralDrafts):
        """What rows share with earlier ones is verified once, and does not count for the cut."""

        def draft(self, batch, slots, requested, verifier):
            super().draft(batch, slots, requested, verifier)
            store = self.branches
            store.counts[0] = np.minimum(store.counts[0], store.shared[0] + 1)

    for cut in (Cut, OneNewToken):
        with mock.patch("vllm_hsd.tools.reference.cascade.SeveralDrafts", cut):
            assert several(2, 2, 3, verifier) < 1e-9


class SharedUniforms(SeveralDrafts):
    """All rows are drawn with the same uniforms, so they are equal."""

    def draft(self, batch, slots, requested, verifier):
        super().draft(batch, slots, requested, verifier)
        store, chain = self.branches, self.drafts
        for row, drafts in enumerate(store.drafts):
            count = min(int(store.room[0]), int(chain.counts[0]))
            store.token_ids[0, row], store.counts[0, row] = chain.token_ids[0], count
            drafts.probs = chain.probs


class OwnTokenCuts(SeveralDrafts):
    """A row is left out by its own first token."""

    def draft(self, batch, slots, requested, verifier):
        super().draft(batch, slots, requested, verifier)
        self.branches.counts[0] *= self.branches.token_ids[0, :, 0] == 1


class RowsOfAnotherPlace(SeveralDrafts):
    """The second row's later tokens carry the probabilities of its first one."""

    def draft(self, batch, slots, requested, verifier):
        super().draft(batch, slots, requested, verifier)
        drafts = self.branches.drafts[0]
        if drafts.counts[0] > 1:
            drafts.probs[1] = drafts.probs[0]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    ("mutant", "shape", "vocabulary"),
    [
        (SharedUniforms, (1, 2, 2), 3),
        (OwnTokenCuts, (1, 2, 2), 3),
        (RowsOfAnotherPlace, (2, 2, 3), 2),
    ],
)
def test_faulty_drafting_is_caught(mutant, shape, vocabulary, verifier):
    with mock.patch("vllm_hsd.tools.reference.cascade.SeveralDrafts", mutant):
        assert several(*shape, verifier, vocabulary=vocabulary) > 1e-3


def verify_shifted_rows(target, draft, rows, verifier, uniforms):
    """The target's rows of the second draft are those of the place before."""
    target, second = target.clone(), len(rows[0]) + 1
    target[second + 1 :] = target[second:-1].clone()
    return verify_rows(target, draft, rows, verifier, uniforms)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_rows_of_another_node_are_caught(verifier):
    with mock.patch("vllm_hsd.tools.reference.engine.verify_rows", verify_shifted_rows):
        assert several(2, 2, 3, verifier) > 1e-3


def test_greedy_generations_and_their_branches():
    """The further rows begin with the likeliest other tokens, and the text is the target's."""
    table = Table(4, 1)
    level = TableLevel(Table(4, 100), len(PROMPT))
    engine = ReferenceEngine(TableLevel(table, len(PROMPT)), [level], [LevelOptions(2)], branches=3)
    answer = engine.generate(PROMPT, 6, temperature=0)
    text = ()
    for _ in range(6):
        text += (int(np.argmax([float(p) for p in table(text)])),)
    assert tuple(answer.token_ids) == text
