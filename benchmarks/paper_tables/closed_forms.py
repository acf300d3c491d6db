"""Closed forms of the speculative decoding literature, of rates, draft lengths and costs.

A rate is the probability that one drafted token is accepted (1 - total variation: Leviathan et al.
(2023), Corollary 3.6), costs are in any one unit of time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def expected_tokens(rate: float, draft_tokens: int) -> float:
    """E[L], tokens of one target call: (1 - rate^(n+1)) / (1 - rate), bonus token included.

    Source: Leviathan et al. (2023), equation 1.
    """
    return float((rate ** np.arange(draft_tokens + 1)).sum())


def expected_rounds(rate: float, draft_tokens: int, wanted: int) -> float:
    """gamma(rate, t, T): expected rounds of t drafted tokens until at least T are produced.

    A round gains min(G, t) + 1 tokens, where G counts the acceptances before the first
    rejection. Renewal: N(T) = 1 + sum_g P(gain = g) N(T - g), and N is 0 at and below 0.

    Source: Fast Inference via Hierarchical Speculative Decoding, section 2.4 (the paper
    estimates gamma empirically; this is its exact value).
    """
    alive = rate ** np.arange(draft_tokens + 1)  # P(at least k tokens are accepted)
    gain = alive - np.append(alive[1:], 0.0)  # gain[k] = P(k accepted, k + 1 gained)
    rounds = np.zeros(wanted + 1)
    for have in range(1, wanted + 1):
        reach = min(draft_tokens + 1, have)
        rounds[have] = 1.0 + gain[:reach] @ rounds[have - reach : have][::-1]
    return float(rounds[wanted])


def cascade_latency(
    costs: Sequence[float], rates: Sequence[float], draft_lengths: Sequence[int]
) -> float:
    """Expected time per token of a cascade under independent acceptance.

    Args:
        costs: time of one forward of each model, cheapest first, the target last [K + 1].
        rates: acceptance rate of each model by the one above it [K].
        draft_lengths: tokens that each level passes on [K].

    Source: Fast Inference via Hierarchical Speculative Decoding, Corollary 3.1.
    """
    if not draft_lengths:
        return float(costs[-1])
    time = draft_lengths[0] * costs[0]
    for i in range(1, len(draft_lengths)):
        time = expected_rounds(rates[i - 1], draft_lengths[i - 1], draft_lengths[i]) * (
            time + costs[i]
        )
    return float((time + costs[-1]) / expected_tokens(rates[-1], draft_lengths[-1]))


def interleaved_tokens(alpha: float, beta: float, m: int, n: int) -> float:
    """Expected tokens of one call of the interleaved cascade (Theorem 3.2, as printed).

    The draft is m blocks of n tokens from the small model and one from the medium model. The
    theorem counts accepted tokens plus one, which is what the lossless form emits: each token
    is verified against the distribution that it was drawn from, and the first rejected one is
    replaced by a draw from norm(max(p - q, 0)). The printed Algorithm 2 keeps the rejected token
    and adds a plain draw from p after it, one token more than the theorem counts and not the
    target's distribution.

    Args:
        alpha: acceptance rate of the medium model's tokens.
        beta: acceptance rate of the small model's tokens.

    Source: An Exploration of Hierarchical Speculative Decoding, Theorem 3.2.
    """
    block = alpha * beta**n
    blocks = block ** np.arange(m + 1)
    return float((beta ** np.arange(n + 1)).sum() * blocks[:-1].sum() + blocks[-1])
