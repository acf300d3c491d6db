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

import sys

import numpy as np

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint32)
_ROUNDS = 10
# What the two key words have grown by when round r begins: [rounds, 2, 1].
_KEY_STEPS = (np.arange(_ROUNDS, dtype=np.uint32)[:, None] * _WEYL)[..., None]
# Where the halves of a 64-bit word lie in memory.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)


def philox(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10, one block per column.

    Args:
        key: [2, N] uint32.
        counter: [4, N] uint32.
    Returns:
        [4, N] uint32.
    """
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: one array for each pair. Products
    # are split by viewing their halves, which saves the shifts and masks.
    even = counter[0::2].astype(np.uint64)
    even_low = _halves(even)[..., _LOW]
    odd = counter[1::2]
    mixed = np.empty_like(odd)
    buffers = []
    for _ in range(2):
        product = np.empty_like(even)
        halves = _halves(product)[::-1]
        buffers.append((product, halves[..., _HIGH], halves[..., _LOW]))
    for r, round_key in enumerate(_KEY_STEPS + key):
        product, high, low = buffers[r % 2]
        np.multiply(even, _MULTIPLIERS, product)
        np.bitwise_xor(high, odd, mixed)
        np.bitwise_xor(mixed, round_key, even_low)
        odd = low
    return np.stack((even_low[0], odd[0], even_low[1], odd[1]))


def _halves(words: np.ndarray) -> np.ndarray:
    return words.view(np.uint32).reshape(*words.shape, 2)


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
    seed, stream, draw = (np.asarray(v).view(np.uint64) for v in (seeds, streams, draws))
    shape = np.broadcast_shapes(seed.shape, stream.shape, draw.shape)
    words = np.zeros((3, *shape), dtype=np.uint64)
    words[0], words[1], words[2] = seed, draw, stream
    halves = _halves(words.reshape(3, -1))
    counter = np.zeros((4, halves.shape[1]), dtype=np.uint32)
    counter[0], counter[1], counter[2] = halves[1, :, _LOW], halves[1, :, _HIGH], halves[2, :, _LOW]
    first, second, _, _ = philox(halves[0, :, [_LOW, _HIGH]], counter)
    bits: np.ndarray = (first >> 5) * 2.0**26 + (second >> 6)
    return (bits * 2.0**-53).reshape(shape)
