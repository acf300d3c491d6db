"""Acceptance along recorded text: survival tables without assuming independent rounds.

Let x be text of the verifying model p and q the law of the drafter on the same contexts. For a
round that starts after x_1..x_c, the joint law of the accepted length tau and of the emitted
text is, for every t up to the draft length,

    hierarchical   P(tau >= t | text) = min over 0 <= s <= t of prod_{r <= s} q_r(x_r) / p_r(x_r)
    tokenwise      P(tau >= t | text) = prod_{r <= t} min(1, q_r(x_r) / p_r(x_r))

with positions r counted from c, whatever the text after t is: the verifier is lossless, so what
follows a rejection is again text of p. One teacher-forced pass over text of p hence gives the
accepted lengths of every drafter and draft length, and the rounds along it are a renewal process
on positions in which the dependence between rounds is kept. All values lie in [0, 1].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Verifier = Literal["block", "standard"]
VERIFIERS: tuple[Verifier, ...] = ("block", "standard")

# Stands for log 0: a product with it is 0 in float64, and differences of sums stay finite.
LOG_ZERO = -1e4


def survival_along(
    log_ratios: ArrayLike, max_tokens: int, verifier: Verifier
) -> NDArray[np.float64]:
    """P(at least t tokens are accepted | text) of a round that starts at each position.

    Args:
        log_ratios: log q(x) - log p(x) of the text's tokens, [..., L]; -inf where q is 0, nan
            past the end of a text.
        max_tokens: the longest draft H.

    Returns:
        float64 [..., L, H + 1 (t)]; 0 where t reaches past the text's end.
    """
    ratios = np.asarray(log_ratios, dtype=np.float64)
    length = ratios.shape[-1]
    past = np.full((*ratios.shape[:-1], max_tokens), np.nan)
    padded = np.concatenate([ratios, past], axis=-1)
    ended = np.isnan(padded)
    steps = np.clip(np.where(ended, LOG_ZERO, padded), LOG_ZERO, -LOG_ZERO)
    if verifier == "standard":
        steps = np.minimum(steps, 0.0)
    alive = np.zeros((*ratios.shape, max_tokens + 1))
    alive[..., 0] = 1.0
    total, lowest = np.zeros_like(ratios), np.zeros_like(ratios)
    for t in range(1, max_tokens + 1):
        here = slice(t - 1, t - 1 + length)
        total += steps[..., here]
        lowest = np.minimum(lowest, total)
        alive[..., t] = np.where(ended[..., here], 0.0, np.exp(lowest))
    return alive


def visited_survival(
    log_ratios: ArrayLike, max_tokens: int, verifier: Verifier
) -> NDArray[np.float64]:
    """Survival table of the rounds that run along the texts, for every draft length.

    For each n, rounds of n drafted tokens follow one another from the start of every text as
    long as n tokens of it are left; positions count as often as a round starts there.

    Args:
        log_ratios: as for `survival_along`, [..., N texts, L].
        max_tokens: the longest draft H; texts shorter than n do not count for n.

    Returns:
        float64 [..., H + 1 (n), H + 1 (t)], P(at least t of n accepted); 0 for t > n. Where no
        text is as long as n, the row of the longest draft seen with the missing tail at 0.
    """
    ratios = np.asarray(log_ratios, dtype=np.float64)
    alive = survival_along(ratios, max_tokens, verifier)
    room = _room(ratios)
    table = np.zeros((*ratios.shape[:-2], max_tokens + 1, max_tokens + 1))
    table[..., 0] = 1.0
    for n in range(1, max_tokens + 1):
        starts = np.where(room >= n, visits(alive, n), 0.0)
        reached = alive[..., : n + 1]
        table[..., n, : n + 1] = _mean(reached, starts, (-3, -2), table[..., n - 1, : n + 1])
    return table


def survival_by_position(
    log_ratios: ArrayLike, max_tokens: int, verifier: Verifier
) -> NDArray[np.float64]:
    """Survival of rounds by how many tokens the verifier has made since it was asked.

    A level below the target writes at most H tokens from where it is asked, and what it meets
    there changes on the way: it is asked where it failed before. The texts start where it is
    asked; rounds of `budget` tokens follow one another along each, as in a cascade.

    Args:
        log_ratios: as for `survival_along`, [..., N texts, L].
        max_tokens: H, the largest budget and the longest text.

    Returns:
        float64 [..., H + 1 (budget), H + 1 (position), H + 1 (t)], P(at least t accepted); 0 for
        t beyond the budget or the H tokens. Where no round of a budget starts, as for the next
        smaller one.
    """
    ratios = np.asarray(log_ratios, dtype=np.float64)[..., :max_tokens]
    alive = survival_along(ratios, max_tokens, verifier)
    length = ratios.shape[-1]
    room, left = _room(ratios), max_tokens - np.arange(length)
    size = max_tokens + 1
    table = np.zeros((*ratios.shape[:-2], size, size, size))
    table[..., 0] = 1.0
    for budget in range(1, size):
        starts = np.where(room >= np.minimum(budget, left), visits(alive, budget), 0.0)
        reached = alive[..., : budget + 1]
        fewer = table[..., budget - 1, :length, : budget + 1]
        table[..., budget, :length, : budget + 1] = _mean(reached, starts, -3, fewer)
    return table


def _room(ratios: NDArray[np.float64]) -> NDArray[np.int64]:
    """Tokens of each text from each position on, [..., L]; nan marks the texts' ends."""
    return (~np.isnan(ratios)).sum(-1, keepdims=True) - np.arange(ratios.shape[-1])


def _mean(
    alive: NDArray[np.float64],
    starts: NDArray[np.float64],
    axis: int | tuple[int, ...],
    otherwise: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Mean survival [..., texts, L, t] of the rounds that start; `otherwise` where none does."""
    weights = starts[..., None]
    total = weights.sum(axis)
    reached = (weights * alive).sum(axis)
    return np.where(total > 0, reached / np.where(total > 0, total, 1.0), otherwise)


def visits(alive: NDArray[np.float64], draft: int) -> NDArray[np.float64]:
    """P(a round starts at a position) where rounds of `draft` tokens follow one another.

    Args:
        alive: as from `survival_along`, [..., L, H + 1]; the first round starts at position 0.

    Returns:
        float64 [..., L].
    """
    length = alive.shape[-2]
    # Accepted k: the next round starts k + 1 further on.
    gain = alive[..., : draft + 1].copy()
    gain[..., :-1] -= gain[..., 1:]
    starts = np.zeros((*alive.shape[:-2], length + draft + 1))
    starts[..., 0] = 1.0
    for c in range(length):
        starts[..., c + 1 : c + draft + 2] += starts[..., c, None] * gain[..., c, :]
    return starts[..., :length]
