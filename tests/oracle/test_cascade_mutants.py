"""Mutants of the real cascade, one fault each: the exact test of losslessness must reject them."""

from unittest import mock

import pytest
import torch
from oracle.test_cascade_exact import PROMPT, VERIFIERS, bias, build

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.tools.reference.cascade import Cascade


def bias_of(mutant: type, kinds: str, options, **settings) -> float:
    """Total variation distance between generations with a mutant and the target."""
    with mock.patch("vllm_hsd.tools.reference.engine.Cascade", mutant):
        return bias(build(kinds), options, 3, **settings)


class ClaimsOwnLevel(Cascade):
    """Writes the proposal probabilities anew, from the level that drafted each token: no fault."""

    def claimed_level(self, level: int) -> int:
        return level

    def claimed(self, level: int, text: list[int]) -> torch.Tensor:
        """[V] probabilities of the token that a level drafted after a text."""
        logits = self.levels[self.claimed_level(level)].row(tuple(text))
        return torch.tensor(logits, dtype=torch.float64).exp()

    def propose(self, batch, slots, requested):
        drafts = super().propose(batch, slots, requested)
        count = int(drafts.counts[0])
        text = batch.tokens[0, len(PROMPT) : batch.end[0]].tolist()
        for t in range(count):
            before = text[: len(text) - count + t]
            drafts.proposals[0][t] = self.claimed(int(drafts.level[0, t]), before)
        return drafts


class ClaimsTopLevel(ClaimsOwnLevel):
    """Horizontal tokens carry the top level's probabilities, though level 0 drew them."""

    def claimed_level(self, level: int) -> int:
        return len(self.levels) - 1


class ClaimsLevelBelow(ClaimsOwnLevel):
    """Verified tokens carry the probabilities of the level below."""

    def claimed_level(self, level: int) -> int:
        return 0


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    ("mutant", "horizontal_tokens"), [(ClaimsTopLevel, 2), (ClaimsLevelBelow, 0)]
)
def test_probabilities_of_another_level_are_caught(mutant, horizontal_tokens, verifier):
    options = [LevelOptions(1, verifier), LevelOptions(3, verifier, max_rounds=1)]
    settings = {"verifier": verifier, "horizontal_tokens": horizontal_tokens}
    assert bias_of(ClaimsOwnLevel, "model, model", options, **settings) < 1e-9
    assert bias_of(mutant, "model, model", options, **settings) > 1e-3


@pytest.mark.parametrize("mutant", [ClaimsTopLevel, ClaimsLevelBelow])
def test_one_level_for_the_tokens_of_an_interleaved_draft_is_caught(mutant):
    options = [LevelOptions(1), LevelOptions(2, "none")]
    assert bias_of(ClaimsOwnLevel, "model, model", options) < 1e-9
    assert bias_of(mutant, "model, model", options) > 1e-3
