"""Verification by the target's own draws: exact, over all outcomes of the noise.

The noise of a position is a number that whoever draws a token there meets; a token is drawn from it
by inverse CDF. What holds for one map from noise to tokens holds for vLLM's: the rule never looks
into it.
"""

from fractions import Fraction

import pytest
from oracle import sequential
from oracle.exact import Choices, Table, Tokens, distance, distribution_of

LENGTH = 3
TARGET = {vocabulary: Table(vocabulary, 1) for vocabulary in (2, 3)}


class Generation:
    """Steps of a draft and its verification, until LENGTH tokens are there.

    Args:
        vocabulary: of the target and its drafters.
        levels: drafters; each one but the first verifies the draft of the one before it.
        lookup: the first one drafts its likeliest tokens, else with the noise of the positions.
        shift: positions from a token of the target to the noise that it is drawn with.
        met_twice: every step after the first begins with noise that the one before it has used.
    """

    def __init__(self, vocabulary, levels, lookup=False, shift=0, met_twice=False) -> None:
        self.target, self.lookup, self.shift = TARGET[vocabulary], lookup, shift
        self.drafters = [Table(vocabulary, 100 + k) for k in range(levels)]
        self.met_twice = met_twice

    def __call__(self, choices: Choices) -> tuple[Tokens, Tokens]:
        """The text, and the target's alone with the same noise."""
        self.choices, self.late = choices, 0
        text, alone = (), ()
        while len(text) < LENGTH:
            draft = ()
            for k, model in enumerate(self.drafters):
                draft = self.verified(model, text, draft) if k else self.drafted(model, text)
            text += self.verified(self.target, text, draft, self.shift)
            self.late += self.met_twice
        self.late = 0
        for _ in range(LENGTH):
            alone += (self.draw(self.target, alone),)
        return text[:LENGTH], alone

    def draw(self, model: Table, text: Tokens, shift: int = 0) -> int:
        return self.choices.sample(model(text), len(text) + shift - self.late)

    def drafted(self, model: Table, text: Tokens) -> Tokens:
        draft = ()
        for _ in range(2):
            row = model(text + draft)
            token = row.index(max(row)) if self.lookup else self.draw(model, text + draft)
            draft += (token,)
        return draft

    def verified(self, model: Table, text: Tokens, draft: Tokens, shift: int = 0) -> Tokens:
        return sequential.coupled(draft, lambda t: self.draw(model, text + draft[:t], shift))


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize(("vocabulary", "levels"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)])
def test_text_is_the_targets_own_for_every_outcome_of_the_noise(vocabulary, levels, lookup):
    found = distribution_of(Generation(vocabulary, levels, lookup))
    assert all(text == alone for text, alone in found)
    texts = {text: weight for (text, _), weight in found.items()}
    assert distance(texts, TARGET[vocabulary].joint(LENGTH)) == 0


def test_noise_of_the_neighboring_position_is_caught():
    found = distribution_of(Generation(2, 1, shift=1))
    assert sum(weight for (text, alone), weight in found.items() if text != alone) > Fraction(1, 10)


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_noise_that_is_met_twice_is_caught(levels):
    texts = distribution_of(lambda choices: Generation(2, levels, met_twice=True)(choices)[0])
    assert distance(texts, TARGET[2].joint(LENGTH)) > Fraction(1, 1000)
