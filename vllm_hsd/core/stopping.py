"""Entropy windows: when a level stops drafting (hsddw_dynamic_window, section 3.1, made lossless).

A draft may end by what its rows and its kept tokens show, never by a token that is then dropped:
the token whose row is too uncertain is kept and is the last one.
"""

from __future__ import annotations

import numpy as np
import torch


def row_entropy(logits: torch.Tensor) -> np.ndarray:
    """Entropy in nats of softmax(logits): [n, V] -> [n] float64 on the host.

    Taken at temperature 1 for every request: it measures the level's confidence, and greedy
    requests have no other row with any entropy.
    """
    return torch.distributions.Categorical(logits=logits).entropy().double().cpu().numpy()


class EntropyThresholds:
    """tau per level and request: the running mean of the entropies at rejected positions.

    The paper starts at 0, which ends every draft after one token until the first rejection; here
    there is no threshold until then.

    Args:
        total: [levels, batch] float64, sums of the entropies at rejected positions.
        count: [levels, batch] int64, how many there were. Both are updated in place.
    """

    def __init__(self, total: np.ndarray, count: np.ndarray) -> None:
        self.total, self.count = total, count

    @classmethod
    def fresh(cls, num_levels: int, batch: int) -> EntropyThresholds:
        return cls(np.zeros((num_levels, batch)), np.zeros((num_levels, batch), dtype=np.int64))

    def exceeded(self, level: int, requests: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        """Which entropies ([n], of [n] requests) lie above their request's threshold."""
        count = self.count[level, requests]
        mean = self.total[level, requests] / np.maximum(count, 1)
        return (entropy > mean) & (count > 0)

    def observe_rejection(self, level: int, requests: np.ndarray, entropy: np.ndarray) -> None:
        """Note the entropies of the rows whose tokens the next model up rejected."""
        self.total[level, requests] += entropy
        self.count[level, requests] += 1
