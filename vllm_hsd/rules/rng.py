"""Counter-based uniforms: one number per (request seed, stream, draw), the same on any machine.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011),
the generator behind Triton's ``tl.philox``, so host and kernels draw the same uniforms.

Streams and draws, on the host and in kernels alike:

- The stream is the level: 0 for the lowest one, the number of levels for the target.
- Level 0 takes one draw for each token of its draft.
- A verification of n draft tokens takes n + 1 draws in a row: the first one is for the token after
  the accepted prefix, draw t after it decides about draft token t.
- Tokens that follow along branches (`rules.branches`) take a draw each. In kernels these are
  numbered by their place, behind all draws of the longest draft (`kernels.branch_walk`).
- No draw is met twice: the reference counts per request and level, a server numbers draws by the
  length of the text (`cascade.schedule.first_draw`), without state.
"""

import numpy as np

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint32)


def philox(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10, one block per column.

    Args:
        key: [2, N] uint32.
        counter: [4, N] uint32.
    Returns:
        [4, N] uint32.
    """
    even, odd = counter[0::2], counter[1::2]
    for r in range(10):
        product = even * _MULTIPLIERS
        high = (product >> 32).astype(np.uint32)[::-1]
        even, odd = high ^ odd ^ (key + np.uint32(r) * _WEYL), product.astype(np.uint32)[::-1]
    return np.stack((even, odd), 1).reshape(4, -1)


def host_uniforms(seeds: np.ndarray, streams: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Uniforms in [0, 1) with 53 random bits, elementwise over int64 arrays that broadcast.

    Args:
        seeds: one per request (any value; 64 bits are the key).
        streams: in [0, 2**32), the level.
        draws: counts the uniforms of a (request, stream); never goes back.

    A uniform belongs to (seed, stream, draw) and to nothing else. The position in the sequence must
    not enter: a rejected position is drawn again by the next call, and its uniform must be new.

    Returns:
        float64 array of the broadcast shape.
    """
    given = np.broadcast_arrays(*(np.asarray(v).view(np.uint64) for v in (seeds, draws, streams)))
    words = [v.ravel() for each in given for v in (each & 0xFFFFFFFF, each >> 32)]
    key, counter = np.split(np.array(words).astype(np.uint32), [2])
    first, second, _, _ = philox(key, counter)
    bits: np.ndarray = (first >> 5) * 2.0**26 + (second >> 6)
    return (bits * 2.0**-53).reshape(given[0].shape)
