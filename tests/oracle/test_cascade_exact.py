"""Exact distributions of whole generations with the real cascade, for every kind of level.

Requests of a few tokens over a vocabulary of two or three; every random draw is enumerated.
test_cascade_mutants.py has the faulty cascades that these tests must reject.
"""

from itertools import product
from unittest import mock

import numpy as np
import pytest
from oracle.exact import Choices, Distribution, Table, Tokens, distance, distribution_of
from oracle.stand_ins import TableLevel, TableLookup, exact_distribution

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.text_store import TextStore, collect_texts
from vllm_hsd.tools.planner.bigram_levels import BigramLevel, BigramModelLevel
from vllm_hsd.tools.reference import ReferenceEngine
from vllm_hsd.tools.reference.stopping import EntropyThresholds

PROMPT = [0, 1, 1]
VERIFIERS = ["block", "standard"]


def store(vocabulary: int, seed: int) -> TextStore:
    return collect_texts([np.random.default_rng(seed).integers(0, vocabulary, 12)], vocabulary)


KINDS = {
    "model": lambda *table: TableLevel(Table(*table), len(PROMPT)),
    "lookup": lambda *table: TableLookup(Table(*table), len(PROMPT)),
    "bigram": lambda *text: BigramLevel(store(*text)),
    "bigram_model": lambda *text: BigramModelLevel(store(*text)),
}
LEVELS = [
    "model", "bigram", "bigram_model", "lookup", "model, model", "lookup, model", "bigram, model",
    "bigram_model, model", "model, bigram_model", "lookup, bigram_model, model",
]  # fmt: skip


def build(kinds: str, vocabulary: int = 2) -> list:
    return [KINDS[kind](vocabulary, 100 + k) for k, kind in enumerate(kinds.split(", "))]


def stopped(table, length: int, eos: int) -> Distribution:
    """The distribution of a model's next tokens, up to a length or the first eos."""

    def program(choices: Choices) -> Tokens:
        text: Tokens = ()
        while len(text) < length and eos not in text:
            text += (choices.sample(table(text)),)
        return text

    return distribution_of(program)


def bias(levels, options, length: int, *, vocabulary=2, eos=None, power=1, **settings) -> float:
    """Total variation distance of a generation to the target, at temperature 1 / power."""
    table = Table(vocabulary, 1)
    engine = ReferenceEngine(TableLevel(table, len(PROMPT)), levels, options, **settings)

    def generate() -> Tokens:
        sampled = engine.generate(PROMPT, length, temperature=1 / power, eos_token_id=eos)
        return tuple(sampled.token_ids)

    expected = stopped(table.tempered(power), length, -1 if eos is None else eos)
    return float(distance(exact_distribution(generate), expected))


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kinds", LEVELS)
def test_level_kinds(kinds, verifier):
    levels = build(kinds)
    options = [LevelOptions(1 + (k > 0), verifier) for k in range(len(levels))]
    assert bias(levels, options, 4, verifier=verifier) < 1e-9


@pytest.mark.parametrize("kinds", ["model", "lookup", "lookup, model"])
def test_vocabulary_of_three(kinds):
    levels = build(kinds, 3)
    options = [LevelOptions(2) for _ in levels]
    assert bias(levels, options, 3, vocabulary=3) < 1e-9


@pytest.mark.parametrize("extra", [(1, 9), (9, 1), (2, 0)])
def test_levels_that_the_text_outgrows(extra):
    """A level sits out for longer texts, and the one below drafts in its place."""
    levels = build("model, model")
    for level, tokens in zip(levels, extra, strict=True):
        level.context_length = len(PROMPT) + tokens
    assert bias(levels, [LevelOptions(1), LevelOptions(3)], 4) < 1e-9


@pytest.mark.parametrize("horizontal_tokens", [1, 2])
@pytest.mark.parametrize("kinds", ["model, model", "lookup, model"])
def test_horizontal_tokens(kinds, horizontal_tokens):
    options = [LevelOptions(1), LevelOptions(3)]
    assert bias(build(kinds), options, 4, horizontal_tokens=horizontal_tokens) < 1e-9


@pytest.mark.parametrize("max_rounds", [1, 2])
def test_rounds(max_rounds):
    options = [LevelOptions(1), LevelOptions(3, max_rounds=max_rounds)]
    assert bias(build("model, model"), options, 4) < 1e-9


@pytest.mark.parametrize(
    ("kinds", "lengths", "verifiers", "verifier", "eos"),
    [
        ("model, model", (1, 3), ("none",), "block", None),
        ("model, model", (2, 3), ("none",), "standard", None),
        ("model, model", (2, 3), ("none",), "block", 0),
        ("model, model", (2, 3), ("none",), "block", 1),
        ("model, model", (2, 3), ("block",), "block", 0),
        ("model, model", (2, 3), ("block",), "block", 1),
        ("lookup, model", (2, 3), ("none",), "block", None),
        ("lookup, model", (2, 3), ("none",), "standard", 1),
        ("lookup, bigram_model, model", (1, 2, 3), ("none", "block"), "block", None),
        ("lookup, bigram_model, model", (1, 2, 3), ("block", "none"), "block", None),
        ("lookup, bigram_model, model", (1, 2, 3), ("none", "none"), "standard", None),
    ],
)
def test_interleaved_levels_and_texts_that_end(kinds, lengths, verifiers, verifier, eos):
    """Chen, "An Exploration of Hierarchical Speculative Decoding", Algorithm 2 made lossless."""
    rules = ("block", *verifiers)
    options = [LevelOptions(n, rule) for n, rule in zip(lengths, rules, strict=True)]
    assert bias(build(kinds), options, 4, verifier=verifier, eos=eos) < 1e-9


@pytest.mark.parametrize("verifiers", list(product(VERIFIERS, repeat=3)))
def test_three_models_with_a_verifier_each(verifiers):
    second, third, last = verifiers
    options = [
        LevelOptions(1),
        LevelOptions(2, second, max_rounds=1),
        LevelOptions(3, third, max_rounds=2),
    ]
    levels = build("model, model, model")
    assert bias(levels, options, 3, verifier=last, horizontal_tokens=1) < 1e-9


def test_temperature_and_temperature_scale():
    options = [LevelOptions(1, temperature_scale=0.5), LevelOptions(3, temperature_scale=1.5)]
    assert bias(build("model, model"), options, 4, power=2) < 1e-9


# Syu and Lee, "Hierarchical Speculative Decoding with Dynamic Windows for Efficient Language Model
# Inference", Table 2: drafts of fixed length, pre-verify, self-verify, both, HSDDW.
VARIANTS = {
    "fixed": ("model", [("fixed", None)]),
    "pre-verify": ("model, model", [("fixed", None), ("fixed", None)]),
    "self-verify": ("model", [("entropy", None)]),
    "both": ("model, model", [("entropy", None), ("fixed", 1)]),
    "three stages": ("model, model", [("entropy", None), ("entropy", None)]),
}
LARGE = ("pre-verify", "three stages")


def strict_thresholds(num_levels: int, batch: int) -> EntropyThresholds:
    """As if a token had been rejected where the entropy was half a nat."""
    return EntropyThresholds(
        np.full((num_levels, batch), 0.5), np.ones((num_levels, batch), dtype=np.int64)
    )


# Two levels by the standard rule have the most outcomes: seconds for the fourth token.
LENGTHS = [
    (variant, verifier, 3 if verifier == "standard" and variant in LARGE else 4)
    for variant in VARIANTS
    for verifier in VERIFIERS
]


@pytest.mark.parametrize(
    ("variant", "fresh", "verifier", "length"),
    [(variant, EntropyThresholds.fresh, *rest) for variant, *rest in LENGTHS]
    + [(variant, strict_thresholds, verifier, 4)
       for variant in ("self-verify", "both", "three stages") for verifier in VERIFIERS]
    + [pytest.param(variant, EntropyThresholds.fresh, "standard", 4, marks=pytest.mark.slow)
       for variant in LARGE],
)  # fmt: skip
def test_entropy_based_early_stopping(variant, fresh, verifier, length):
    kinds, rules = VARIANTS[variant]
    options = [
        LevelOptions(length, verifier, max_rounds=rounds, stopping=stopping)
        for length, (stopping, rounds) in zip([2, 3][-len(rules) :], rules, strict=True)
    ]
    with mock.patch.object(EntropyThresholds, "fresh", fresh):
        assert bias(build(kinds), options, length, verifier=verifier) < 1e-9
