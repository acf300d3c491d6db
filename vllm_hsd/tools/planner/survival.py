"""Acceptance-length survival tables from recorded text, without assuming independent rounds.

Let x be text drawn from the verifying model p, and q the drafter's distribution on the same
contexts. For a round that starts after x_1..x_c, the accepted length tau satisfies, for every t up
to the draft length,

    block       P(tau >= t | text) = min over 0 <= s <= t of prod_{r <= s} q_r(x_r) / p_r(x_r)
    standard    P(tau >= t | text) = prod_{r <= t} min(1, q_r(x_r) / p_r(x_r))

with positions r counted from c, whatever the text after t is: verification is lossless, so the
text after a rejection is again text of p. A prompt lookup proposes point masses: both forms are
then 1 as long as the proposal matches the text, and 0 from the first mismatch on. One
teacher-forced pass over text of p therefore gives the accepted lengths of every drafter and draft
length. The rounds along a text are a renewal process on its positions, which keeps the dependence
between rounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Verifier = Literal["block", "standard"]
VERIFIERS: tuple[Verifier, ...] = ("block", "standard")

# Stands for log 0: a product with it is 0 in float64, and differences of sums stay finite.
LOG_ZERO = -1e4


@dataclass(frozen=True)
class Acceptance:
    """How many tokens M + 1 models accept of each other's drafts of at most T tokens.

    Attributes:
        survival: P(at least t tokens are accepted) in a round of a verifier that has emitted
            `position` tokens since its draft began, [M + 1 (verifier), M + 1 (drafter), T + 1
            (draft length), T + 1 (position), T + 1 (t)]; the target, last, has no positions.
        lookups: by drafter that offers at most what is requested (prompt lookup), P(offers exactly
            m tokens, exactly k accepted) of T requested ones, [M + 1 (verifier), T + 1 (draft
            length), T + 1 (position), T + 1 (m), T + 1 (k)].
    """

    survival: Floats
    lookups: Mapping[int, Floats] = field(default_factory=dict)

    def shortened(self, max_tokens: int) -> Acceptance:
        """The same for drafts of at most `max_tokens` <= T tokens."""
        size = max_tokens + 1
        cut = {k: folded(table[:, :size, :size], max_tokens) for k, table in self.lookups.items()}
        return Acceptance(self.survival[:, :, :size, :size, :size], cut)


def independent_survival(rates: ArrayLike, max_tokens: int) -> Floats:
    """P(at least t drafted tokens are accepted) = rate^t at any draft length and position.

    From rates [...] to float64 [..., T + 1 (draft length), T + 1 (position), T + 1 (t)], read-only.
    """
    size = max_tokens + 1
    alive = np.asarray(rates, dtype=np.float64)[..., None] ** np.arange(size)
    return np.broadcast_to(alive[..., None, None, :], (*alive.shape[:-1], size, size, size))


def folded(joint: Floats, requested: int) -> Floats:
    """P(m offered, k accepted) for a shorter request: both are cut at `requested`.

    From [..., T + 1 (m), T + 1 (k)] to float64 [..., requested + 1 (m), requested + 1 (k)].
    """
    for axis in (-2, -1):
        kept, beyond = np.split(joint, [requested], axis)
        joint = np.concatenate([kept, beyond.sum(axis, keepdims=True)], axis)
    return joint


def survival_along(log_ratios: ArrayLike, verifier: Verifier) -> Floats:
    """P(at least t tokens are accepted | text) of a round that starts at each position.

    Args:
        log_ratios: log q(x) - log p(x) of the text's tokens, [..., L, H]: entry [c, j] of token
            c + j in a draft from position c on (see `windows` where q does not depend on where a
            draft began); -inf where q is 0, nan past the end of a text.

    Returns:
        float64 [..., L, H + 1 (t)]; 0 where t reaches past the text's end.
    """
    ratios = np.asarray(log_ratios, dtype=np.float64)
    ended = np.isnan(ratios)
    steps = np.clip(np.where(ended, LOG_ZERO, ratios), LOG_ZERO, -LOG_ZERO)
    if verifier == "standard":
        steps = np.minimum(steps, 0.0)
    lowest = np.minimum.accumulate(np.minimum(steps.cumsum(-1), 0.0), axis=-1)
    alive = np.where(ended, 0.0, np.exp(lowest))
    return np.concatenate([np.ones_like(alive[..., :1]), alive], axis=-1)


def windows(values: Floats, size: int) -> Floats:
    """`size` values from each position on: [..., L] -> read-only [..., L, size], nan at the end."""
    past = np.full((*values.shape[:-1], size - 1), np.nan)
    return np.lib.stride_tricks.sliding_window_view(np.concatenate([values, past], -1), size, -1)


def visits(alive: Floats, draft_length: int) -> Floats:
    """P(a round starts at a position), [..., L], where rounds of `draft_length` tokens follow
    one another from position 0 on; `alive` [..., L, H + 1] is from `survival_along`.
    """
    length = alive.shape[-2]
    # Accepted k: the next round starts k + 1 further on.
    gain = alive[..., : draft_length + 1].copy()
    gain[..., :-1] -= gain[..., 1:]
    starts = np.zeros((*alive.shape[:-2], length + draft_length + 1))
    starts[..., 0] = 1.0
    for c in range(length):
        starts[..., c + 1 : c + draft_length + 2] += starts[..., c, None] * gain[..., c, :]
    return starts[..., :length]


def survival_table(log_ratios: Floats, verifier: Verifier, by_position: bool) -> Floats:
    """Survival table of the rounds that run along the texts, for every draft length.

    For each n, rounds of n drafted tokens follow one another from the start of every text as
    long as n tokens of it are left; positions count as often as a round starts there.

    Args:
        log_ratios: as for `survival_along`, of texts [N texts, L, H].
        by_position: rounds apart by how many tokens the verifier has emitted since its draft began.
            A level below the target emits at most H tokens from where its draft begins, and what
            it meets there changes on the way: it begins where it failed before. The texts start
            where its draft begins, so L <= H. Otherwise the same row at all positions.

    Returns:
        float64 [H + 1 (n), H + 1 (position), H + 1 (t)], P(at least t of n accepted); 0 for t > n
        or beyond the texts. Where no round of a draft length starts, as for the next shorter one.
    """
    _, length, longest = log_ratios.shape
    alive = survival_along(log_ratios, verifier)
    inside = ~np.isnan(log_ratios[..., 0])
    room = inside.sum(-1, keepdims=True) - np.arange(length)
    table = np.zeros((longest + 1, longest + 1, longest + 1))
    table[..., 0] = 1.0
    places, axis = (slice(length), 0) if by_position else (slice(None), (0, 1))
    for n in range(1, longest + 1):
        starts = round_starts(alive, n, room, by_position)[..., None]
        total, reached = starts.sum(axis), (starts * alive[..., : n + 1]).sum(axis)
        mean = reached / np.where(total > 0, total, 1.0)
        table[n, places, : n + 1] = np.where(total > 0, mean, table[n - 1, places, : n + 1])
    return table


def lookup_table(
    offered: Ints, accepted: Ints, lengths: Ints, max_tokens: int, by_position: bool
) -> Floats:
    """P(offers m tokens, k accepted) of the lookups in the rounds that run along the texts.

    Args:
        offered, accepted: tokens that a lookup of H tokens at each position of each text
            proposes, and how many of them the text continues with, [N texts, L]; or, where that
            depends on the draft length n, of n tokens [H (n), N texts, L].
        lengths: tokens of each text, [N].
        max_tokens: H.
        by_position: as for `survival_table`.

    Returns:
        float64 [H + 1 (draft length), H + 1 (position), H + 1 (m), H + 1 (k)].
    """
    size = max_tokens + 1
    if by_position:
        offered, accepted = offered[..., :max_tokens], accepted[..., :max_tokens]
    positions = np.arange(offered.shape[-1])
    room = lengths[:, None] - positions
    columns = size if by_position else 1
    cells = (positions % columns * size + offered) * size + accepted
    each = max_tokens, *offered.shape[-2:]
    cells, accepted = np.broadcast_to(cells, each), np.broadcast_to(accepted, each)
    table = np.zeros((size, columns, size, size))
    table[..., 0, 0] = 1.0
    for n in range(1, size):
        alive = (accepted[n - 1, ..., None] >= np.arange(size)).astype(np.float64)
        starts = round_starts(alive, n, room, by_position)
        counted = np.bincount(cells[n - 1].ravel(), starts.ravel(), columns * size * size)
        counted = counted.reshape(columns, size, size)
        total = counted.sum((-2, -1), keepdims=True)
        table[n] = np.where(total > 0, counted / np.where(total > 0, total, 1.0), table[n - 1])
    return np.broadcast_to(table, (size, size, size, size)).copy()


def round_starts(alive: Floats, draft_length: int, room: Ints, by_position: bool) -> Floats:
    """`visits`, 0 where the text has no room for the draft: `room` [..., L] tokens from there on.

    With `by_position` no draft is longer than what is left of the verifier's own H tokens.
    """
    length, size = alive.shape[-2:]
    left = size - 1 - np.arange(length) if by_position else size - 1
    return np.where(room >= np.minimum(draft_length, left), visits(alive, draft_length), 0.0)
