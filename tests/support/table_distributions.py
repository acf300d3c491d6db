"""Tables in the place of models, and the exact distribution of the text that they give."""

import itertools

import numpy as np
import torch
from support.exact_joint_distribution import next_token_distribution

# Sampling parameters that change a distribution.
CASES = {
    "temperature 1": {},
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k at 1.3": {"top_k": 4, "temperature": 1.3},
    "min_p": {"min_p": 0.15, "temperature": 1.2},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {1: 1.5, 3: -2.0}},
    "allowed tokens": {"allowed_token_ids": [0, 2, 3, 5]},
}


def table(seed: int, vocabulary: int, spread: float) -> torch.Tensor:
    """Normal logits [V, V] of standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(vocabulary, vocabulary)) * spread).float()


def tables(vocabulary=6, difference=0.7):
    target = table(0, vocabulary, 1.3)
    return target, target + difference * table(1, vocabulary, 1.0)


def cascade(name: str) -> dict:
    """Configuration of a cascade of tables, see `support.table_runner.TableRunner`."""
    name, lengths = name.removesuffix(", adaptive"), name.endswith(", adaptive")
    target, draft = tables()
    middle = target + 0.4 * table(2, len(target), 1.0)
    levels = {
        "one": [{"model": draft}],
        "two": [{"model": draft, "num_tokens": 1}, {"model": middle}],
        "three": [
            {"model": draft, "num_tokens": 1},
            {"model": middle, "num_tokens": 2},
            {"model": target + 0.3 * table(3, len(target), 1.0)},
        ],
        "bigram": [{"bigram": "counts.npz", "num_tokens": 1}, {"model": middle}],
        "suffix": [{"suffix": {"store": "pairs"}, "num_tokens": 2}, {"model": middle}],
        "lookup": [{"ngram": {"max": 2}, "num_tokens": 1}, {"model": middle}],
        "lookup alone": [{"bigram": "counts.npz"}],
        "sources": [
            {"sources": [{"ngram": {"max": 2}}, {"bigram": "counts.npz"}], "num_tokens": 2},
            {"model": middle},
        ],
        "choice": [{"sources": [{"ngram": {"max": 2}}, {"bigram": "pairs"}, {"model": draft}]}],
        "choice of n-grams": [
            {
                "sources": [{"ngram": {"max": 2}}, {"ngram_model": "pairs", "order": 2}],
                "num_tokens": 2,
            },
            {"model": middle},
        ],
        "choice below": [
            {"sources": [{"bigram": "pairs"}, {"model": draft}], "num_tokens": 2},
            {"model": middle},
        ],
        "unverified": [
            {"bigram": "counts.npz", "num_tokens": 2},
            {"model": middle, "verifier": "none"},
        ],
        "entropy": [
            {"model": draft, "num_tokens": 2, "stopping": "entropy"},
            {"model": middle, "stopping": "entropy"},
        ],
        "entropy, unverified": [
            {"model": draft, "num_tokens": 2, "stopping": "entropy"},
            {"model": middle, "verifier": "none", "stopping": "entropy"},
        ],
        "horizontal": [{"model": draft, "num_tokens": 1}, {"model": middle}],
        "horizontal lookup": [
            {"ngram": {"max": 2}, "num_tokens": 1},
            {"model": middle, "stopping": "entropy"},
        ],
        "n-grams": [
            {"ngram_model": "pairs", "order": 2, "num_tokens": 2},
            {"model": middle},
        ],
        "n-grams above": [
            {"ngram": {"max": 2}, "num_tokens": 1},
            {"ngram_model": "pairs", "order": 2, "num_tokens": 2},
            {"model": middle},
        ],
        "equal": [{"model": target, "num_tokens": 1}, {"model": target}],
    }[name]
    found = {"num_speculative_tokens": 4, "levels": levels}
    if "horizontal" in name:
        found["horizontal_tokens"] = 2
    return {**found, "adaptive": True} if lengths else found


def joint(params, length):
    """Exact distribution of the first `length` tokens after token 0 of the target's table."""
    target, _ = tables()
    distribution = {}
    for outcome in itertools.product(range(len(target)), repeat=length):
        probability, text = 1.0, [0]
        for t, token in enumerate(outcome):
            row = next_token_distribution(
                target[text[-1]].double().numpy(), [0], outcome[:t], params, None
            )
            probability *= row[token]
            text.append(token)
        if probability > 0:
            distribution[outcome] = probability
    return distribution
