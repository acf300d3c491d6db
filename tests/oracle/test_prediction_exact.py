"""Exact distributions of generations with a predicted text, and with forced tokens.

A prediction is a function of the request, and where it is followed one of the text so far: it may
be anything. So may forced tokens, as long as it is not the drawn draft that decides about them.
"""

from unittest import mock

import numpy as np
import pytest
from oracle.test_cascade_exact import PROMPT, VERIFIERS, bias, model
from oracle.test_sources_exact import Fresh, LooksAtTheDraft

from vllm_hsd.cascade.level import LevelOptions, Sources
from vllm_hsd.cascade.prediction import Prediction, PredictionLevel

PREDICTIONS = {
    "none": [],
    "one token": [1],
    "as long as the answer": [0, 1, 0, 0],
    "longer": [1, 0, 1, 1, 0, 1, 0, 0, 1],
    "the prompt": PROMPT,
    "of another tokenizer": [7, 0, 9, 1, 8],
}


def prediction(name: str, vocabulary: int = 2) -> PredictionLevel:
    level = PredictionLevel()
    tokens = np.array(PREDICTIONS[name], np.int32)
    level.predictions[0] = Prediction(tokens % vocabulary, len(PROMPT))
    return level


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("name", PREDICTIONS)
def test_any_prediction(name, verifier):
    assert bias([prediction(name)], [LevelOptions(2, verifier)], 4, verifier=verifier) < 1e-9
    below = [LevelOptions(2, verifier), LevelOptions(3, verifier, max_rounds=2)]
    levels = [prediction(name), model(2, 101)]
    assert bias(levels, below, 4, verifier=verifier) < 1e-9


@pytest.mark.parametrize("name", ["longer", "of another tokenizer"])
def test_three_tokens_and_eos(name):
    options = [LevelOptions(2)]
    assert bias([prediction(name, 3)], options, 3, vocabulary=3) < 1e-9
    assert bias([prediction(name)], options, 4, eos=1) < 1e-9


def beside_a_model(name: str) -> Sources:
    return Sources(["prediction", "model"], [prediction(name)], model(2, 110))


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("name", PREDICTIONS)
def test_among_sources(name, branches):
    with mock.patch("vllm_hsd.tools.reference.lowest_level.SourceChoice", Fresh):
        assert bias([beside_a_model(name)], [LevelOptions(2)], 3, branches=branches) < 1e-9


class Forces(LooksAtTheDraft):
    """Lets the model draft and puts what is predicted in the place of that, whatever it is."""

    def unwanted(self, batch, start):
        return True


class ForcesWhatDiffers(Forces):
    """Keeps a draft that begins as the prediction does."""

    def unwanted(self, batch, start):
        only = np.zeros(1, np.int64)
        end, batch.end[0] = int(batch.end[0]), start
        found = self.lookups[0].lookup(batch.texts(only), np.ones(1, np.int64))
        batch.end[0] = end
        return bool(found.counts[0]) and found.token_ids[0, 0] != batch.tokens[0, start]


def test_a_drawn_draft_may_be_replaced_but_not_for_what_it_is():
    def bias_of(lowest_level) -> float:
        with (
            mock.patch("vllm_hsd.tools.reference.cascade.LowestLevel", lowest_level),
            mock.patch("vllm_hsd.tools.reference.lowest_level.SourceChoice", Fresh),
        ):
            return bias([beside_a_model("longer")], [LevelOptions(2)], 4)

    assert bias_of(Forces) < 1e-9
    assert bias_of(ForcesWhatDiffers) > 1e-3
