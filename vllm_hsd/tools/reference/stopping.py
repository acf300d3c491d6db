"""Entropy-based early stopping: a level ends its draft where it is unsure.

After "HSDDW: Hierarchical Speculative Decoding with Dynamic Windows", section 3.1, made lossless: a
draft may end by what its probabilities and its kept tokens show, never by a token that is then
dropped. The token that was drawn from an uncertain distribution is kept and is the last one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def entropy_nats(logits: torch.Tensor) -> np.ndarray:
    """Entropy in nats of softmax(logits): [n, V] -> [n] float64 on the host, NaN if not finite.

    Taken at temperature 1 for every request: it measures the level's confidence, and greedy
    requests have no other distribution with any entropy.
    """
    distribution: Any = torch.distributions.Categorical(logits=logits, validate_args=False)
    found: np.ndarray = distribution.entropy().double().cpu().numpy()
    return found


class EntropyThresholds:
    """Per level and request: the running mean of the entropies at rejected positions.

    The paper starts at 0, which ends every draft after one token until the first rejection; here
    there is no threshold until then.

    Args:
        total: [levels, slots] float64, sums of the entropies at rejected positions.
        count: [levels, slots] int64, how many there were. Both are updated in place.
    """

    def __init__(self, total: np.ndarray, count: np.ndarray) -> None:
        self.total, self.count = total, count

    @classmethod
    def fresh(cls, num_levels: int, num_slots: int) -> EntropyThresholds:
        """Thresholds of requests that have seen no rejection."""
        return cls(np.zeros((num_levels, num_slots)), np.zeros((num_levels, num_slots), np.int64))

    def exceeded(self, level: int, slots: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        """Which entropies ([n], of [n] requests) exceed their request's threshold: [n] bool."""
        count = self.count[level, slots]
        mean = self.total[level, slots] / np.maximum(count, 1)
        found: np.ndarray = (entropy > mean) & (count > 0)
        return found

    def observe_rejection(self, level: int, slots: np.ndarray, entropy: np.ndarray) -> None:
        """Add the entropies ([n]) at the positions that the next model up rejected."""
        self.total[level, slots] += entropy
        self.count[level, slots] += 1
