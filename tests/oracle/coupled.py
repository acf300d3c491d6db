"""Verification by the target's own draws: the text does not depend on what is drafted.

The target draws a token at every position from its own distribution there, with noise that belongs
to the position, and a draft is accepted while it equals these draws: what is emitted is what the
target alone emits with that noise (Daliri, Musco and Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding", arXiv:2408.07978). A drafter that draws with the same noise
is accepted with probability at least (1 - TV) / (1 + TV), a point mass at x with the best possible
one, p(x).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def verify_coupled(
    tokens: np.ndarray, lengths: np.ndarray, choose: Callable[[np.ndarray, int], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Accept while the draft equals the target's own draw.

    Args:
        tokens: [batch, max_n] int64 draft tokens; -1 marks an empty position and ends the draft.
        lengths: [batch] int64, draft lengths n.
        choose: (requests [k], t) -> [k] int64, the target's tokens at position t of these
            requests, whose first t draft tokens are accepted. It is called once for each token that
            is emitted, and for no other one.

    Returns:
        (token ids [batch, max_n + 1] int64 padded with -1, accepted tokens [batch] int64).
    """
    size, width = tokens.shape
    token_ids = np.full((size, width + 1), -1, dtype=np.int64)
    accepted = np.zeros(size, dtype=np.int64)
    going = np.arange(size)
    for t in range(width + 1):
        if not len(going):
            break
        token_ids[going, t] = drawn = choose(going, t)
        if t < width:
            going = going[(drawn == tokens[going, t]) & (t < lengths[going])]
            accepted[going] += 1
    return token_ids, accepted
