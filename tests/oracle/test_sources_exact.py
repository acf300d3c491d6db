"""Exact distributions of whole generations with several sources at the lowest level.

Whatever the rule that chooses, as long as it looks at no token that it then drops and at no outcome
that is still to come: rules that do must fail the same comparison.
"""

import zlib
from unittest import mock

import numpy as np
import pytest
from oracle.test_cascade_exact import VERIFIERS, bias, lookup, model, pair_model

from vllm_hsd.cascade.level import LevelOptions, Sources
from vllm_hsd.tools.reference.branching import BranchChoice, BranchingLevel
from vllm_hsd.tools.reference.cascade import Cascade
from vllm_hsd.tools.reference.lowest_level import LowestLevel
from vllm_hsd.tools.reference.source_choice import SourceChoice

SOURCES = {
    "lookup": (1, None),
    "two lookups": (2, None),
    "model": (0, model),
    "lookup, model": (1, model),
    "two lookups, pair_model": (2, pair_model),
}


def sources(kinds: str, vocabulary: int = 2) -> Sources:
    count, drafter = SOURCES[kinds]
    return Sources(
        names=[str(i) for i in range(count + (drafter is not None))],
        lookups=[lookup(vocabulary, 100 + i) for i in range(count)],
        drafter=None if drafter is None else drafter(vocabulary, 110),
    )


class Fresh(SourceChoice):
    """The rule, anew for each generation: enumerated ones must not learn from each other."""

    def forget(self, slot):
        self.budget.__init__(self.sources, self.budget.lengths, 1)
        self.__init__(self.sources, self.budget, 1)


class Adversary(SourceChoice):
    """Decides by a hash of the text, of all offers and of all that ever happened in the request."""

    history = 0

    def forget(self, slot):
        super().forget(slot)
        self.history = 0

    def note(self, *facts) -> int:
        self.history = zlib.crc32(repr((self.history, facts)).encode())
        return self.history

    def begin(self, verifier, texts):
        self.note(texts.tokens[texts.rows[0], : texts.ends[0]].tolist())
        super().begin(verifier, texts)

    def remember(self, first, slots, starts, offers):
        self.note(first, offers.token_ids.tolist(), offers.counts.tolist())
        super().remember(first, slots, starts, offers)

    def best(self, slots, offers, room, sure):
        bits = self.note(room.tolist(), offers.token_ids.tolist())
        source = bits % (len(offers.counts) + 1) - 1
        counts = np.zeros(1, dtype=np.int64)
        if source >= 0:
            counts = np.minimum(offers.counts[source], 1 + bits // 8 % 3)
        return np.where(counts > 0, source, -1), counts, np.ones(1)

    def begins(self, slots, room, sure):
        return np.array([self.note(room.tolist()) % 3 > 0])

    def acceptance_of(self, slots, confidence, drafted):
        self.note(confidence.tolist())
        return np.ones(1)

    def goes_on(self, slots, room, sure, drafted):
        return np.array([self.note(room.tolist()) % 2 > 0] * len(slots))


@pytest.mark.parametrize("rule", [Fresh, Adversary])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", SOURCES)
def test_any_rule_under_the_target(kinds, verifier, rule):
    with mock.patch("vllm_hsd.tools.reference.lowest_level.SourceChoice", rule):
        levels, options = [sources(kinds)], [LevelOptions(2, verifier)]
        assert bias(levels, options, 4, verifier=verifier) < 1e-9


@pytest.mark.parametrize("rule", [Fresh, Adversary])
@pytest.mark.parametrize("kinds", SOURCES)
def test_any_rule_below_a_verifying_level(kinds, rule):
    with mock.patch("vllm_hsd.tools.reference.lowest_level.SourceChoice", rule):
        levels = [sources(kinds), model(2, 101)]
        options = [LevelOptions(2), LevelOptions(3, max_rounds=2)]
        assert bias(levels, options, 4, horizontal_tokens=kinds == "lookup, model") < 1e-9


class FreshBranches(Fresh, BranchChoice):
    """Everything pays before the first time is known."""


class BranchAdversary(Adversary, BranchChoice):
    """What is verified depends on every token of the chain that was drawn, too."""

    def choose(self, grow):
        (found,) = grow(0.0)
        tokens = [[node.token for node in piece.path] for piece in found]
        return [found[: self.note(tokens) % (len(found) + 1)]]

    def forget(self, slot):
        Adversary.forget(self, slot)
        self.table.__init__()
        self.waiting.clear()


class DropsTheChain(BranchingLevel):
    """Does without a drawn chain that begins as what a lookup has found."""

    def _ask_model(self, batch, slots, requested, trees):
        found = [set(tree.root.children) for tree in trees]
        chains = super()._ask_model(batch, slots, requested, trees)
        if chains[0] and chains[0][0].token in found[0]:
            self.drafts.clear(slots)
            batch.end[slots] = batch.cached[0, slots] = [tree.start for tree in trees]
            chains = [[]]
        return chains


@pytest.mark.parametrize("rule", [FreshBranches, BranchAdversary])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", SOURCES)
def test_any_rule_of_branches(kinds, verifier, rule):
    with mock.patch("vllm_hsd.tools.reference.branching.BranchChoice", rule):
        levels, options = [sources(kinds)], [LevelOptions(2, verifier)]
        assert bias(levels, options, 4, verifier=verifier, branches=3) < 1e-9


def test_a_chain_that_is_dropped_because_of_a_branch_is_caught():
    levels, options = [sources("lookup, model", 3)], [LevelOptions(1)]
    with mock.patch("vllm_hsd.tools.reference.branching.BranchChoice", FreshBranches):
        assert bias(levels, options, 2, vocabulary=3, branches=3) < 1e-9
        with mock.patch("vllm_hsd.tools.reference.cascade.BranchingLevel", DropsTheChain):
            assert bias(levels, options, 2, vocabulary=3, branches=3) > 1e-3


class Timed(Cascade):
    """With learned prices, anew for each generation, on a clock that runs by calls."""

    def propose(self, batch, slots, requested):
        if batch.end[slots[0]] <= 4:
            self.__init__([self.budget.sources], self.options, len(self.top))
            self.ticks, batch.cached[:] = 0, 0
        with mock.patch("vllm_hsd.budget.clock.seconds", self.tick):
            self.budget.times[-1].observe(1 + self.ticks % 3, 1.0 + self.ticks % 2)
            self.budget.step = self.budget.prices(slots, requested, False)
            return super().propose(batch, slots, requested)

    def tick(self) -> float:
        self.ticks += 1
        return 1e-4 * self.ticks**2


@pytest.mark.parametrize("kinds", SOURCES)
def test_learned_prices(kinds):
    with mock.patch("vllm_hsd.tools.reference.engine.Cascade", Timed):
        assert bias([sources(kinds)], [LevelOptions(2)], 4) < 1e-9


@pytest.mark.parametrize("settings", [{"vocabulary": 3}, {"eos": 0}, {"eos": 1}])
def test_three_tokens_and_eos(settings):
    with mock.patch("vllm_hsd.tools.reference.lowest_level.SourceChoice", Adversary):
        levels = [sources("lookup, model", settings.get("vocabulary", 2))]
        assert bias(levels, [LevelOptions(2)], 3, **settings) < 1e-9


def test_a_drafter_that_the_text_outgrows():
    levels = [sources("lookup, model")]
    levels[0].drafter.context_length = 4
    with mock.patch("vllm_hsd.tools.reference.lowest_level.SourceChoice", Fresh):
        assert bias(levels, [LevelOptions(2)], 4) < 1e-9


class StopsByTheToken(LowestLevel):
    """Goes on by the token just drawn, which stays in the draft; or drops it where it stops."""

    drops = False

    def _draft_token(self, batch, slots, uniforms):
        logits, ended = super()._draft_token(batch, slots, uniforms)
        stops = batch.tokens[batch.rows[slots], batch.end[slots] - 1] == 0
        if self.drops and stops.any():
            self.drafts.counts[slots[stops]] -= 1
            batch.end[slots[stops]] -= 1
            batch.cached[0, slots] = np.minimum(batch.cached[0, slots], batch.end[slots])
        return logits, ended | stops


class StopsAndDrops(StopsByTheToken):
    drops = True


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("levels", [1, 2])
def test_a_draft_may_end_by_its_last_token_if_that_stays(levels, verifier):
    def bias_of(lowest_level) -> float:
        with (
            mock.patch("vllm_hsd.tools.reference.cascade.LowestLevel", lowest_level),
            mock.patch.object(SourceChoice, "goes_on", lambda self, slots, *_: slots >= 0),
        ):
            found, options = [sources("model")], [LevelOptions(3, verifier)]
            if levels == 2:
                found.append(model(2, 101))
                options.append(LevelOptions(3, max_rounds=2))
            return bias(found, options, 3, verifier=verifier)

    assert bias_of(StopsByTheToken) < 1e-9
    assert bias_of(StopsAndDrops) > 1e-3


class LooksAtTheDraft(LowestLevel):
    """Lets the drafter draft, looks at its first token, and may use the lookup instead."""

    drops = True

    def unwanted(self, batch, start: int) -> bool:
        return batch.tokens[0, start] == 0

    def _draft_from_sources(self, batch, budget, slots, requested, verifier):
        start = int(batch.end[0])
        with mock.patch.object(budget, "best", self.none):
            super()._draft_from_sources(batch, budget, slots, requested, verifier)
        drafts = self.drafts
        if not drafts.counts[0] or not self.unwanted(batch, start) or not self.drops:
            return
        drafts.clear(slots)
        batch.end[slots] = start
        batch.cached[0, slots] = np.minimum(batch.cached[0, slots], start)
        found = self.lookups[0].lookup(batch.texts(slots), requested)
        self._append_found(batch, slots, found.token_ids, found.counts)

    def none(self, slots, offers, room, sure):
        return np.array([-1]), np.array([0]), np.ones(1)


class LooksAndKeeps(LooksAtTheDraft):
    """As above, but whatever it sees changes nothing."""

    drops = False


class KnowsTheVerdict(LooksAtTheDraft):
    """Uses the lookup where the target is less sure of the drawn token than the drafter was."""

    def unwanted(self, batch, start: int) -> bool:
        from oracle.exact import Table

        text = tuple(batch.tokens[0, 3:start].tolist())
        token = int(batch.tokens[0, start])
        drawn = float(np.exp(self.models.models[0].row(text)[token]))
        return float(Table(2, 1)(text)[token]) < drawn


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("mutant", [LooksAtTheDraft, KnowsTheVerdict])
def test_a_choice_by_the_drawn_token_is_caught(mutant, verifier):
    def bias_of(lowest_level) -> float:
        with mock.patch("vllm_hsd.tools.reference.cascade.LowestLevel", lowest_level):
            levels = [sources("lookup, model")]
            return bias(levels, [LevelOptions(2, verifier)], 3, verifier=verifier)

    assert bias_of(LooksAndKeeps) < 1e-9
    assert bias_of(mutant) > 1e-3
