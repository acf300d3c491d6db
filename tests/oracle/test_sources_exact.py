"""Exact distribution of steps on a CPU whose chain has branches next to it, of any rule.

The program, the choice among sources and what is emitted are those that serve (`host.host_program`,
`budget.source_choice`, `host.host_branches`); every draw is enumerated. Branches may depend on all
that was drafted, a chain that was drawn included; a chain may not depend on branches.
"""

import zlib
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from host.test_choice_exact import last_again
from host.test_drawn_rows_exact import EnumeratedStep
from oracle.exact import Choices, Table, Tokens, deviation
from oracle.test_program_exact import VERIFIERS, Chosen, exact_engine
from support.programs import MAX_NUM_REQS

from vllm_hsd.budget.source_choice import Estimates, SourcesLookup
from vllm_hsd.cascade.counters import LevelCounts
from vllm_hsd.cascade.program import ProgramSources
from vllm_hsd.host.host_branches import HostBranches
from vllm_hsd.kernels.chain_verify import ChainResult

LENGTH, BRANCHES = 2, 2


def other_token(state, text):
    """A lookup: the token after the last one, as often as may be."""
    last_again(state, text)
    end, count = int(state.end[0]), int(state.drafted[0, 0])
    state.window[0, end - count : end] = 1 - state.window[0, end - count : end].clamp(max=1)


class BranchedStep(EnumeratedStep):
    """One request at temperature 1 with the branches of two lookups, maybe next to a model."""

    def __init__(self, vocabulary: int, has_model: bool) -> None:
        self.drafts, self.length, self.target = BRANCHES + 1, LENGTH, Table(vocabulary, 1)
        each = [
            Estimates(torch.full((9,), sure, dtype=torch.float64), by_token=False)
            for sure in (0.3, 0.4)
        ]
        self.lookup = lookup = SourcesLookup(
            list(zip((last_again, other_token), each, strict=True)), 0.05, MAX_NUM_REQS, LENGTH,
            torch.device("cpu"), has_drafter=has_model, rows=self.drafts, batch=1,
        )  # fmt: skip
        searches = {"lookup": lambda state: lookup(state, self.engine.text)}
        if has_model:
            searches = {
                "sources": ProgramSources(
                    lambda state: lookup.offer(state, self.engine.text),
                    lookup.choose,
                    lookup.drawn,
                    lookup.prefers_drafter,
                    lookup.drafter_selected,
                )
            }
        self.engine = exact_engine((LENGTH,), vocabulary=vocabulary, host=True, **searches)
        self.chosen, self.slot = Chosen(self.engine), int(self.engine.index[0])
        self.hosted = hosted = HostBranches.__new__(HostBranches)
        hosted.state, hosted.lookup, hosted.longest = self.engine.state, lookup, LENGTH
        hosted.accepted = np.zeros(MAX_NUM_REQS, dtype=np.int64)
        hosted.counts = torch.zeros(1, self.drafts, dtype=torch.int32)
        inputs = torch.arange(0, self.drafts * (LENGTH + 1), LENGTH + 1, dtype=torch.int32)
        hosted.offsets = {LENGTH: inputs[None]}
        hosted.winner, hosted.emitted = torch.zeros(2, 1, dtype=torch.int32)
        counts = SimpleNamespace(host=LevelCounts.zeros(1))
        hosted.runner = SimpleNamespace(speculator=SimpleNamespace(counts=counts))

    def begin(self, choices: Choices) -> None:
        """Nothing but the prompt is committed, and nothing is learned."""
        self.chosen.begin(choices)
        self.lookup.shared.zero_()
        self.lookup.forget(torch.tensor([self.slot]))

    def rows(self) -> tuple[list[int], bool, list[list[int]]]:
        """(chain, whether the model drew it, branches) of a proposal."""
        [chain] = self.engine.propose()
        each = zip(self.lookup.branches[0], self.lookup.branch_counts[0].tolist(), strict=True)
        drawn = self.lookup.has_drafter and bool(self.lookup.drawn[self.slot])
        return chain, drawn, [row[:n].tolist() for row, n in each]


def as_chosen(chain, branches):
    """Those of the next best offers."""
    return chain, branches


def by_hash(chain, branches):
    """Cut, left out or put in another order by all that was drafted, the chain included."""
    bits = zlib.crc32(repr((chain, branches)).encode())
    rows = [row[: (bits >> (2 * r)) % (LENGTH + 1)] for r, row in enumerate(branches)]
    return chain, rows[:: 1 - bits // 64 % 2 * 2]


def against_the_chain(chain, branches):
    """All tokens but those of the chain, where the lookups have some."""
    return chain, [[1 - min(token, 1) for token in chain], [*chain[:-1], 0]][: len(branches)]


def drops_the_chain(chain, branches):
    """Does without a chain that begins as a branch does."""
    chain, branches = against_the_chain(chain, branches)
    return ([] if chain[:1] == [1] else chain), branches


def bias(rule, verifier: str, has_model: bool, vocabulary=2, length=3) -> tuple[Fraction, set]:
    """Total variation distance to the target's joint distribution.

    And the rows that won, each with whether a model drew the chain.
    """
    step, won = BranchedStep(vocabulary, has_model), set()
    target, engine, chosen = step.target, step.engine, step.chosen

    def generate(choices: Choices) -> Tokens:
        step.begin(choices)
        text: Tokens = ()
        while len(text) < length:
            chain, drawn, branches = step.rows()
            chain, branches = rule(chain, branches)
            accepted, token = chosen.target_step(target, chain, verifier, text, drawn)
            verdict = [*chain[:accepted], token, *[-1] * (LENGTH - accepted)]
            counts = torch.tensor([accepted], dtype=torch.int32)
            found = ChainResult(torch.tensor([verdict]), counts, counts + 1, torch.zeros(1, 3))
            emitted = step.emit([chain, *branches], text, chain=found)
            won.add((int(step.hosted.winner[0]) > 0, drawn))
            engine.commit(0, list(emitted))
            text = (*text, *emitted)
        return text

    with chosen.draws(), mock.patch("vllm_hsd.host.branches.follow_branches", step.follow_branches):
        return deviation(generate, target, length), won


@pytest.mark.parametrize("rule", [as_chosen, by_hash, against_the_chain])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("has_model", [False, True])
def test_any_branches_beside_a_chain_are_lossless(has_model, verifier, rule):
    found, won = bias(rule, verifier, has_model)
    assert found == 0
    assert won >= {(False, has_model), (True, has_model)}


def test_three_tokens():
    assert bias(by_hash, "block", True, vocabulary=3, length=2)[0] == 0


def test_a_chain_that_is_dropped_because_of_a_branch_is_caught():
    assert bias(drops_the_chain, "block", True)[0] > Fraction(1, 1000)
