"""Where tokens lie in the distributions that they should have been drawn from."""

from __future__ import annotations

import numpy as np
import torch

# Columns of `token_ranges`.
FIGURES, TAIL = 4, 3


def token_ranges(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Probability of each token, and of all tokens ordered before it.

    Args:
        logits: [n, V] floating, of the distribution that is sampled from: temperature applied,
            -inf where a filter or mask excludes a token.
        token_ids: [n] int64.

    Returns:
        [n, FIGURES] float64 on the host: the token's probability; the probability before it in the
        order of token ids; the one before it by falling probability, ties in the order of ids; and
        (TAIL) that of all tokens that are no likelier than it, itself included.
    """
    probs = logits.float().softmax(-1)
    columns = torch.arange(probs.shape[1], device=probs.device)
    earlier = columns < token_ids[:, None]
    own = probs.gather(1, token_ids[:, None])
    before = (probs * earlier).sum(-1, dtype=torch.float64)
    likelier = (probs > own) | ((probs == own) & earlier)
    above = (probs * likelier).sum(-1, dtype=torch.float64)
    # Not 1 less the likelier ones: most of the digits of a small one would be lost.
    tail = (probs * (probs <= own)).sum(-1, dtype=torch.float64)
    return torch.stack((own[:, 0].double(), before, above, tail), 1).cpu()


def randomized(ranges: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Randomized quantiles [k, n] float64, uniform on [0, 1) where tokens follow the target.

    Args:
        ranges: [n, 1 + k], the token's probability and that before it in k orders.
        uniforms: [k, n] in [0, 1).
    """
    return np.clip(ranges[:, 1:].T + uniforms * ranges[:, 0], 0, 1)
