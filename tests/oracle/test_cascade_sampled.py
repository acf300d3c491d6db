"""The cascade's distribution with its own random numbers: one ragged batch, chi-square.

`test_cascade_exact` enumerates the random draws. Here they come from the generator that the runners
use, and requests of different lengths are in one batch.
"""

import numpy as np
import pytest
import torch
from oracle.exact import Table
from oracle.stand_ins import TableLevel, TableLookup, draft_batch
from support.exact_joint_distribution import chi_square_p_value

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.rules.chain import verify_batch
from vllm_hsd.tools.reference.cascade import Cascade

REQUESTS, LENGTH, VOCABULARY = 10_000, 4, 3
PROMPT = 2
TARGET = Table(VOCABULARY, 1)


def generate(
    levels, options, horizontal_tokens: int = 0, cascade: type[Cascade] = Cascade
) -> np.ndarray:
    """[REQUESTS, LENGTH] tokens of as many requests, all of them in one batch."""
    target = TableLevel(TARGET, PROMPT)
    cascade = cascade(levels, options, REQUESTS, horizontal_tokens)
    all_requests = np.arange(REQUESTS)
    longest = options[-1].draft_length
    tokens = np.zeros((REQUESTS, PROMPT + LENGTH + longest + 1), dtype=np.int32)
    batch, length = draft_batch(tokens, PROMPT, len(levels)), np.full(REQUESTS, PROMPT)
    cached = np.zeros((len(levels) + 1, REQUESTS), dtype=np.int64)
    while (length < PROMPT + LENGTH).any():
        batch.end, batch.cached = length.copy(), cached[:-1]
        # Finished requests stay in the batch without drafting, as in a runner.
        requested = np.clip(PROMPT + LENGTH - 1 - length, 0, longest)
        drafts = cascade.propose(batch, all_requests, requested)
        unfinished = np.flatnonzero(length < PROMPT + LENGTH)
        counts = drafts.counts[unfinished]
        ends = length[unfinished] + counts
        logits = target.forward(
            tokens, unfinished, cached[-1, unfinished], ends - cached[-1, unfinished], counts + 1
        )
        chain = drafts.chain_batch(unfinished, logits.softmax(-1))
        drawn = batch.uniforms(unfinished, counts + 1, len(levels))
        token_ids, accepted = verify_batch(chain, "block", drawn)
        cascade.record_acceptance(unfinished, accepted, batch.thresholds)
        tokens[unfinished, length[unfinished] + accepted] = token_ids[
            np.arange(len(unfinished)), accepted
        ]
        length[unfinished] += accepted + 1
        cached[-1, unfinished] = ends
        cached = np.minimum(cached, length - 1)
    return tokens[:, PROMPT : PROMPT + LENGTH]


def p_value(tokens: np.ndarray) -> float:
    """That of a chi-square test of all outcomes against the target's distribution."""
    distribution = {outcome: float(weight) for outcome, weight in TARGET.joint(LENGTH).items()}
    return chi_square_p_value(list(map(tuple, tokens.tolist())), distribution)


def model(seed: int) -> TableLevel:
    return TableLevel(Table(VOCABULARY, seed), PROMPT)


CASES = {
    "one model": ([model(100)], [LevelOptions(3)], 0),
    "lookup, model": ([TableLookup(Table(VOCABULARY, 100), PROMPT), model(101)], None, 0),
    "two models": ([model(100), model(101)], None, 0),
    "horizontal tokens": ([model(100), model(101)], None, 1),
    "entropy": (
        [model(100), model(101)],
        [LevelOptions(2, stopping="entropy"), LevelOptions(3, stopping="entropy")],
        0,
    ),
    "three models": (
        [model(100), model(101), model(102)],
        [LevelOptions(1), LevelOptions(2, "standard", max_rounds=1), LevelOptions(3)],
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_joint_distribution_of_many_requests(case):
    levels, options, horizontal_tokens = CASES[case]
    assert (
        p_value(generate(levels, options or [LevelOptions(2), LevelOptions(3)], horizontal_tokens))
        > 1e-3
    )


class ClaimsOtherProbabilities(Cascade):
    """Mutant: claims proposal probabilities of a higher temperature than it drew from."""

    def propose(self, batch, slots, requested):
        drafts = super().propose(batch, slots, requested)
        if drafts.probs is not None:
            rows = torch.from_numpy(np.unique(drafts.rows(slots, drafts.length)))
            rows = rows[rows >= 0]
            others = drafts.probs[rows].sqrt()
            drafts.probs[rows] = others / others.sum(-1, keepdim=True)
        return drafts


def test_probabilities_that_were_not_drawn_from_are_caught():
    levels, options = [model(100), model(101)], [LevelOptions(2), LevelOptions(3)]
    assert p_value(generate(levels, options, cascade=ClaimsOtherProbabilities)) < 1e-6
