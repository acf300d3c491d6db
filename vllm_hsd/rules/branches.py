"""Further drafts beside a chain: rows of point masses that the text may go on along.

The chain is verified as ever. The token after its accepted part is the target's own; where a branch
has it at that place, the target has computed what follows, and the next token is drawn from that
row, and so on. Every token after the chain is drawn from the target's distribution there, with a
uniform of its own, so a branch decides only how far a step gets: it may depend on all that was
drafted, tokens of the chain that are rejected included. A chain with probabilities is drawn before
it, from what the branches have no part in, and stays whatever they are.

Several drawn drafts of one model are verified together instead, as a tree (`rules.tree`). A row may
be shortened, or left out, by all that was drawn for the rows before it, not by its own tokens or
those of later ones.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def follow(
    token_ids: np.ndarray,
    counts: np.ndarray,
    branches: np.ndarray,
    branch_counts: np.ndarray,
    draw: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Go on along branches from what the verification of the chain emitted.

    Args:
        token_ids: [n, W] int64 tokens emitted so far, padded with -1.
        counts: [n] int64, how many; 0 for a request that emits nothing.
        branches: [n, R - 1, L] int64, every row from the first drafted place on: a part that rows
            share is in each of them.
        branch_counts: [n, R - 1] int64 tokens of each row; 0 for none.
        draw: (requests [k], rows [k] from 1 on, places [k]) -> [k] int64, the target's tokens after
            the first `place` tokens of these rows, or -1 where its distribution is not normalized.
            It is called for tokens that are emitted, and for no other one.

    Returns:
        (token ids [n, W'] int64 padded with -1; counts [n] int64; [n] int64, the row that holds all
        emitted tokens but the last one, 0 for the chain).
    """
    size, _, length = branches.shape
    winner, none = np.zeros(size, dtype=np.int64), branch_counts < np.maximum(counts, 1)[:, None]
    if none.all():
        return token_ids, counts, winner
    width = max(token_ids.shape[1], length + 1)
    emitted = np.full((size, width), -1, dtype=np.int64)
    emitted[:, : token_ids.shape[1]] = token_ids
    # Rows that begin with all that was emitted.
    same = branches == emitted[:, None, :length]
    same |= np.arange(length) >= counts[:, None, None]
    open_ = same.all(2) & ~none & (counts > 0)[:, None]
    counts = counts.copy()
    going = np.flatnonzero(open_.any(1))
    while len(going):
        row, place = open_[going].argmax(1), counts[going]
        winner[going] = row + 1
        token = draw(going, row + 1, place)
        drawn = token >= 0
        going, place, token = going[drawn], place[drawn], token[drawn]
        emitted[going, place] = token
        counts[going] += 1
        next_token = branches[going, :, np.minimum(place, length - 1)]
        open_[going] &= (place[:, None] < branch_counts[going]) & (next_token == token[:, None])
        going = going[open_[going].any(1)]
    return emitted, counts, winner
