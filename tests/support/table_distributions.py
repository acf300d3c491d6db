"""Tables in the place of models, and the exact distribution of the text that they give."""

import itertools

import numpy as np
import torch
from support.exact_joint_distribution import next_token_distribution


def table(seed: int, vocabulary: int, spread: float) -> torch.Tensor:
    """Normal logits [V, V] of standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(vocabulary, vocabulary)) * spread).float()


def tables(vocabulary=6, difference=0.7):
    target = table(0, vocabulary, 1.3)
    return target, target + difference * table(1, vocabulary, 1.0)


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
