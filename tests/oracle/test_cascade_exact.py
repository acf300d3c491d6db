"""Exact distributions of whole generations with the real cascade, for every kind of level.

Requests of a few tokens over a vocabulary of two or three; every random draw is enumerated.
"""

from unittest import mock

import numpy as np
import pytest
import torch
from oracle.exact import Choices, Distribution, Table, Tokens, distance, distribution_of
from oracle.stand_ins import TableLevel, TableLookup, exact_distribution

from vllm_hsd.core.bigram import BigramLevel, count_bigrams
from vllm_hsd.core.cascade import Cascade, LevelOptions
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.reference import ReferenceEngine

PROMPT = [0, 1, 1]
VERIFIERS = ["block", "standard"]


def model(vocabulary: int, seed: int, **kind) -> TableLevel:
    return TableLevel(Table(vocabulary, seed), len(PROMPT), **kind)


def lookup(vocabulary: int, seed: int) -> TableLookup:
    return TableLookup(Table(vocabulary, seed), len(PROMPT))


def bigram(vocabulary: int, seed: int) -> BigramLevel:
    rng = np.random.default_rng(seed)
    return BigramLevel(count_bigrams([rng.integers(0, vocabulary, 12)], vocabulary))


def stopped(table, length: int, eos: int) -> Distribution:
    """The distribution of a model's next tokens, up to a length or the first eos."""

    def program(choices: Choices) -> Tokens:
        text: Tokens = ()
        while len(text) < length and eos not in text:
            text += (choices.sample(table(text)),)
        return text

    return distribution_of(program)


def bias(levels, plans, length: int, *, vocabulary=2, eos=None, power=1, **settings) -> float:
    """Total variation distance of a generation to the target, at temperature 1 / power."""
    table = Table(vocabulary, 1)
    engine = ReferenceEngine(TableLevel(table, len(PROMPT)), levels, plans, **settings)

    def generate() -> Tokens:
        sampled = engine.generate(PROMPT, length, temperature=1 / power, eos_token_id=eos)
        return tuple(sampled.token_ids)

    expected = stopped(table.tempered(power), length, -1 if eos is None else eos)
    return float(distance(exact_distribution(generate), expected))


LEVELS = {
    "model": [model],
    "bigram": [bigram],
    "lookup": [lookup],
    "model, model": [model, model],
    "lookup, model": [lookup, model],
    "bigram, model": [bigram, model],
    "model, bigram": [model, bigram],
    "lookup, bigram, model": [lookup, bigram, model],
}


def build(kinds: str, vocabulary: int = 2):
    return [kind(vocabulary, 100 + i) for i, kind in enumerate(LEVELS[kinds])]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", LEVELS)
def test_level_kinds(kinds, verifier):
    levels = build(kinds)
    plans = [LevelOptions(1 + (k > 0), verifier) for k in range(len(levels))]
    assert bias(levels, plans, 4, verifier=verifier) < 1e-9


@pytest.mark.parametrize("kinds", ["model", "lookup", "lookup, model"])
def test_vocabulary_of_three(kinds):
    levels = build(kinds, 3)
    plans = [LevelOptions(2) for _ in levels]
    assert bias(levels, plans, 3, vocabulary=3) < 1e-9


def test_levels_without_a_cache():
    levels = [model(2, 100, keeps_cache=False), model(2, 101, keeps_cache=False)]
    assert bias(levels, [LevelOptions(1), LevelOptions(2)], 4) < 1e-9


@pytest.mark.parametrize("tail", [1, 2])
@pytest.mark.parametrize("kinds", ["model, model", "lookup, model"])
def test_tail(kinds, tail):
    assert bias(build(kinds), [LevelOptions(1), LevelOptions(3)], 4, horizontal_tokens=tail) < 1e-9


@pytest.mark.parametrize("rounds", [1, 2])
def test_rounds(rounds):
    assert (
        bias(build("model, model"), [LevelOptions(1), LevelOptions(3, max_rounds=rounds)], 4) < 1e-9
    )


@pytest.mark.parametrize("eos", [0, 1])
def test_eos(eos):
    levels = build("model, model")
    assert bias(levels, [LevelOptions(2), LevelOptions(3)], 4, eos=eos) < 1e-9


def test_temperature_and_temperature_scale():
    plans = [LevelOptions(1, temperature_scale=0.5), LevelOptions(3, temperature_scale=1.5)]
    assert bias(build("model, model"), plans, 4, power=2) < 1e-9


# hsddw_dynamic_window, Table 2: drafts of fixed length, pre-verify, self-verify, both, HSDDW.
VARIANTS = {
    "fixed": ("model", [("fixed", None)]),
    "pre-verify": ("model, model", [("fixed", None), ("fixed", None)]),
    "self-verify": ("model", [("entropy", None)]),
    "both": ("model, model", [("entropy", None), ("fixed", 1)]),
    "three stages": ("model, model", [("entropy", None), ("entropy", None)]),
}


def no_thresholds_yet(num_levels: int, batch: int) -> EntropyThresholds:
    return EntropyThresholds(
        np.zeros((num_levels, batch)), np.zeros((num_levels, batch), dtype=np.int64)
    )


def strict_thresholds(num_levels: int, batch: int) -> EntropyThresholds:
    """As if a token of a row of half a nat had been rejected."""
    return EntropyThresholds(
        np.full((num_levels, batch), 0.5), np.ones((num_levels, batch), dtype=np.int64)
    )


@pytest.mark.parametrize("fresh", [no_thresholds_yet, strict_thresholds])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_windows(variant, verifier, fresh):
    kinds, rules = VARIANTS[variant]
    plans = [
        LevelOptions(budget, verifier, max_rounds=rounds, stopping=window)
        for budget, (window, rounds) in zip([2, 3][-len(rules) :], rules, strict=True)
    ]
    with mock.patch.object(EntropyThresholds, "fresh", fresh):
        assert bias(build(kinds), plans, 4, verifier=verifier) < 1e-9


def test_entropy_windows_end_drafts_early():
    def mean_drafts(window: str) -> float:
        engine = ReferenceEngine(
            TableLevel(Table(2, 1), len(PROMPT)),
            build("model, model"),
            [LevelOptions(2, stopping=window), LevelOptions(3, stopping=window)],
        )

        def drafted() -> Tokens:
            return tuple(level.drafted for level in engine.generate(PROMPT, 4).levels)

        with mock.patch.object(EntropyThresholds, "fresh", strict_thresholds):
            distribution = exact_distribution(drafted)
        return float(sum(weight * sum(counts) for counts, weight in distribution.items()))

    assert mean_drafts("entropy") < mean_drafts("fixed") - 0.05


class LooksAtTokens(Cascade):
    """The lowest level ends its draft at a token that its own row finds unlikely."""

    keeps_it = True

    def _draft_lowest(self, batch, slots, requested):
        super()._draft_lowest(batch, slots, requested)
        drafts = self.drafts[0]
        count = drafts.counts[0]
        if not count:
            return
        token_ids = torch.from_numpy(drafts.token_ids[0, :count])
        likely = (drafts.probs[torch.arange(count), token_ids] >= 0.5).numpy()
        kept = count if likely.all() else int(likely.argmin()) + self.keeps_it
        drafts.counts[:] = kept
        batch.end[slots] += kept - count
        batch.cached[0, slots] = np.minimum(batch.cached[0, slots], batch.end[slots])


class LooksAndDrops(LooksAtTokens):
    """As above, but the unlikely token is removed: the fault that a window must not have."""

    keeps_it = False


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", ["model", "model, model"])
def test_a_window_that_looks_at_a_removed_token_is_caught(kinds, verifier):
    plans = [LevelOptions(2, verifier) for _ in LEVELS[kinds]]

    def bias_of(cascade: type[Cascade]) -> float:
        with mock.patch("vllm_hsd.reference.engine.Cascade", cascade):
            return bias(build(kinds), plans, 3, verifier=verifier)

    assert bias_of(LooksAtTokens) < 1e-9
    assert bias_of(LooksAndDrops) > 1e-3


class DropsCorrections(Cascade):
    """A level forgets the last token that its own verification drew."""

    def _draft_verified(self, batch, level, slots, requested):
        super()._draft_verified(batch, level, slots, requested)
        drafts = self.drafts[level]
        dropped = drafts.counts > 0
        drafts.counts -= dropped
        batch.end[slots] -= dropped
        cached = batch.cached[: level + 1, slots]
        batch.cached[: level + 1, slots] = np.minimum(cached, batch.end[slots])


def test_a_dropped_correction_is_caught():
    plans = [LevelOptions(2), LevelOptions(2, max_rounds=1)]
    with mock.patch("vllm_hsd.reference.engine.Cascade", DropsCorrections):
        assert bias(build("model, model"), plans, 3) > 1e-3
