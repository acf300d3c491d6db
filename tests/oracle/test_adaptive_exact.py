"""Exact distributions of generations on a CPU whose levels and lengths change at every step.

What serves (`host.host_program`, with the budget of `host.host_budget`) runs on tables, whatever
selects the levels, as long as it looks only at committed text, at what a lookup offers and at
earlier acceptance. Selectors that look at a drafted token before it is verified must fail the same
comparison.
"""

import zlib
from fractions import Fraction
from itertools import combinations
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from oracle.exact import Choices, Table, Tokens, deviation
from oracle.test_program_exact import VERIFIERS, Chosen, exact_engine
from support.drafting_levels import drafting_levels
from support.marks import slow_but
from support.programs import MAX_NUM_REQS, Engine

from vllm_hsd.cascade.level import StepLevels

VOCABULARY, LENGTH = 2, 4
TARGET = Table(VOCABULARY, 1)
# Draft lengths.
KINDS = {
    "model": (2,),
    "lookup": (2,),
    "model, model": (1, 2),
    "lookup, model": (1, 2),
    "lookup, model, model": (1, 2, 3),
    "longer rounds": (2, 3),
}


def crc(seen: object) -> int:
    return zlib.crc32(repr(seen).encode())


def hashed(state) -> None:
    """A lookup: any tokens by the text, and after some texts none."""
    start = int(state.end[0])
    for at in range(start, start + int(state.requested[0, 0])):
        bits = crc(state.window[0, :at].tolist())
        if not bits % 3:
            break
        state.window[0, at] = bits // 3 % VOCABULARY
        state.end[0] += 1
    state.drafted[0, 0] = state.end[0] - start


class Adversary:
    """Selects by a hash of the text, of the offer and of all that was accepted so far."""

    # Whether the target verifies other tokens than the draft, as point masses.
    forced = False

    def begin(self, engine: Engine) -> None:
        self.engine, self.history = engine, []

    def select(self, state) -> StepLevels:
        program = self.engine.program
        seen = [self.engine.text[self.engine.index[0]].tolist(), self.history]
        if program.has_lookup and len(self.history) % 2:
            seen.append(program.draft_ahead(state, program.drafts).counts.tolist())
        bits, lengths = crc(seen), program.schedule.draft_lengths
        subsets = [s for n in range(len(lengths) + 1) for s in combinations(range(len(lengths)), n)]
        levels = subsets[bits % len(subsets)]
        drafts = tuple(1 + (bits >> (8 + k)) % lengths[k] for k in levels)
        return StepLevels(levels, drafts, np.array([drafts[-1]]) if levels else None)

    def tick(self) -> float:
        return 0.0

    def drafted(self, draft: list[int]) -> list[int]:
        return draft

    def verified(self, accepted: int, drafted: int) -> None:
        self.history.append(accepted)


class LooksAtTheDraft(Adversary):
    """Drafts, then gives the draft up because of its first token: biased."""

    def select(self, state) -> None:
        return None

    def drafted(self, draft: list[int]) -> list[int]:
        return [] if draft[:1] == [0] else draft


class ShortensByTheDraft(LooksAtTheDraft):
    """Cuts the draft after its first token because of the second: biased."""

    def drafted(self, draft: list[int]) -> list[int]:
        return draft[:1] if draft[1:2] == [0] else draft


class Forces(Adversary):
    """After some texts other tokens are verified than were drafted, as a grammar forces them."""

    def drafted(self, draft: list[int]) -> list[int]:
        engine, slot = self.engine, int(self.engine.index[0])
        length = int(engine.length[slot])
        bits = crc(engine.text[slot, :length].tolist())
        tokens = [bits >> 3 & 1, bits >> 4 & 1]
        self.forced = self.replaces(draft, tokens, bits)
        if self.forced:
            computed = engine.program.caches.computed[:, slot]
            np.minimum(computed, length - 1, out=computed)
        return tokens if self.forced else draft

    def replaces(self, draft: list[int], tokens: list[int], bits: int) -> bool:
        return bits % 3 > 0


class ForcesWhatDiffers(Forces):
    """Keeps a draft that begins as what is forced does: biased."""

    select = LooksAtTheDraft.select

    def replaces(self, draft: list[int], tokens: list[int], bits: int) -> bool:
        return draft[:1] != tokens[:1]


class EndsByRows(Adversary):
    """Ends the drafts of models by a hash of the rows so far, and of what was accepted."""

    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        engine.program.budget = self

    def level_verified(self, *_, **__) -> None:
        """Learns nothing."""

    timed = level_verified

    def ends(self, level: int) -> bool:
        return True

    def goes_on(self, level: int, slots, estimates: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        seen = [level, self.history, np.round(estimates[0, : drafted[0]], 9).tolist()]
        return np.array([crc(seen) % 2 == 0])


class EndsByTheDraft(EndsByRows):
    """Ends a draft before a token because of what that one is: biased."""

    select = LooksAtTheDraft.select

    def goes_on(self, level: int, slots, estimates: np.ndarray, drafted: np.ndarray) -> np.ndarray:
        state = self.engine.state
        if drafted[0] > 1 and not state.window[0, int(state.end[0]) - 1]:
            state.drafted[level], state.end[0] = state.drafted[level] - 1, state.end[0] - 1
        return np.array([False])


class Learning(Adversary):
    """The budget that serves, anew for each generation, on a clock that runs by calls."""

    def begin(self, engine: Engine) -> None:
        from vllm_hsd.host.host_budget import HostBudget

        super().begin(engine)
        lengths, program = list(engine.schedule.draft_lengths), engine.program
        levels = drafting_levels(lengths, looks_up=program.has_lookup)
        program.budget = self.budget = HostBudget(levels, MAX_NUM_REQS)
        program.estimates = lambda state, _: np.full((1, lengths[0]), 0.7)
        self.ticks = 0
        self.batch = SimpleNamespace(
            num_reqs=1,
            idx_mapping_np=engine.index.numpy(),
            num_scheduled_tokens=np.ones(1, dtype=np.int64),
            has_prefill=False,
        )

    def tick(self) -> float:
        self.ticks += 1
        return float(self.ticks**2)

    def select(self, state) -> StepLevels:
        self.state = state
        selected = self.budget.select(self.engine.program, state, 1, np.array([LENGTH]))
        self.history.append(selected.levels)
        return selected

    def drafted(self, draft: list[int]) -> list[int]:
        self.budget.proposal_ended(self.engine.program, self.state)
        return draft

    def verified(self, accepted: int, drafted: int) -> None:
        self.batch.num_scheduled_tokens[0] = 1 + drafted
        told = np.array([accepted + 1]), np.array([drafted - accepted])
        self.budget.step_ended(self.batch, self.engine.program, *told)


def bias(rule: Adversary, kinds: str, verifier: str, length=LENGTH) -> tuple[Fraction, set]:
    """Total variation distance to the target's joint distribution, and what was selected."""
    lookup = hashed if "lookup" in kinds else None
    kind = {"vocabulary": VOCABULARY, "lookup": lookup, "host": True}
    engine = exact_engine(KINDS[kinds], verifier=verifier, **kind)
    chosen, used = Chosen(engine), set()

    def generate(choices: Choices) -> Tokens:
        chosen.begin(choices)
        rule.begin(engine)
        text: Tokens = ()
        while len(text) < length:
            [draft] = engine.propose(rule.select)
            used.add(engine.program.selection.levels)
            draft = rule.drafted(draft)
            accepted, token = chosen.target_step(TARGET, draft, verifier, text, not rule.forced)
            rule.verified(accepted, len(draft))
            engine.commit(0, [*draft[:accepted], token])
            text = (*text, *draft[:accepted], token)
        return text

    with (
        chosen.draws(),
        mock.patch("vllm_hsd.budget.clock.seconds", rule.tick),
        mock.patch("vllm_hsd.host.host_budget._agreed", lambda found: found()),
    ):
        return deviation(generate, TARGET, length), used


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", list(KINDS)[:-1])
def test_any_selection_by_the_past_is_lossless(kinds, verifier):
    found, used = bias(Adversary(), kinds, verifier)
    assert found == 0
    assert len(used) >= min(2 * len(KINDS[kinds]), 6)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", ["model", "lookup, model", "model, model", "longer rounds"])
def test_drafts_that_end_by_their_rows_are_lossless(kinds, verifier):
    assert bias(EndsByRows(), kinds, verifier)[0] == 0


@pytest.mark.parametrize("kinds", ["lookup", "model", "lookup, model", "model, model"])
def test_forced_tokens_are_lossless(kinds):
    assert bias(Forces(), kinds, "block")[0] == 0


@pytest.mark.parametrize("kinds", ["lookup", "lookup, model", "model, model"])
def test_the_budget_is_lossless(kinds):
    found, used = bias(Learning(), kinds, "block")
    assert found == 0 and len(used) > 1


MUTANTS = LooksAtTheDraft, ShortensByTheDraft, ForcesWhatDiffers
# The first of them ends every draft of a model alone after one token.
CAUGHT = [(EndsByTheDraft, "model, model"), *((mutant, "model") for mutant in MUTANTS)]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    ("mutant", "kinds"),
    slow_but(CAUGHT, [*CAUGHT, *((mutant, "model, model") for mutant in MUTANTS)]),
)
def test_a_selection_by_the_draft_is_caught(mutant, kinds, verifier):
    assert bias(mutant(), kinds, verifier, length=3)[0] > Fraction(1, 1000)
