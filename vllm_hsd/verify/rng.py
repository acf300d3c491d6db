"""Counter-based coins: the same number for the same (request seed, stream, draw), on any machine.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011),
the generator behind Triton's ``tl.philox``, so host and kernel toss the same coins.
"""

import numpy as np
import torch

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_ROUNDS = 10
_LOW32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
# What the two key words have grown by when round r begins: [rounds, 2, 1].
_KEY_STEPS = (np.arange(_ROUNDS, dtype=np.uint64)[:, None] * _WEYL)[..., None]


def philox(key: np.ndarray, counter: np.ndarray) -> np.ndarray:
    """Philox4x32-10, one block per column.

    Args:
        key: [2, N] or [2, 1] uint64 array of 32-bit words.
        counter: [4, N] uint64 array of 32-bit words.
    Returns:
        [4, N] uint64 array of 32-bit words.
    """
    keys = (_KEY_STEPS + key) & _LOW32
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: one array for each pair.
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = even * _MULTIPLIERS
        even = product[::-1] >> _32
        even ^= odd
        even ^= round_key
        even &= _LOW32
        odd = product[::-1] & _LOW32
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniforms(seeds: torch.Tensor, streams: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Uniform coins in [0, 1) with 53 random bits, elementwise over arguments that broadcast.

    A coin belongs to (seed, stream, draw) and to nothing else: the position in the sequence must
    not enter, because a rejected position is drawn again by the next call and its coin must be new.

    Args:
        seeds: int64, one per request (any value; 64 bits are the key).
        streams: int64 in [0, 2**32), names the level and the purpose of the coin.
        draws: int64, counts the coins of a (request, stream); never goes back.
    Returns:
        float64 tensor of the broadcast shape on the device of ``seeds``. A kernel that takes
        the upper 24 bits of the first Philox word gets the same number rounded down.
    Raises:
        ValueError: an argument is not an int64 tensor, or the shapes do not broadcast.
    """
    arguments = {"seeds": seeds, "streams": streams, "draws": draws}
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) or value.dtype != torch.int64:
            raise ValueError(f"{name} must be an int64 tensor, got {_describe(value)}.")
    words = [value.cpu().numpy().view(np.uint64) for value in arguments.values()]
    try:
        seed, stream, draw = np.broadcast_arrays(*words)
    except ValueError as error:
        shapes = ", ".join(f"{name} {tuple(v.shape)}" for name, v in arguments.items())
        raise ValueError(f"shapes do not broadcast: {shapes}.") from error
    shape = seed.shape
    seed, stream, draw = seed.ravel(), stream.ravel(), draw.ravel()
    counter = np.zeros((4, seed.size), dtype=np.uint64)
    counter[0] = draw & _LOW32
    counter[1] = draw >> _32
    counter[2] = stream & _LOW32
    first, second, _, _ = philox(np.stack((seed & _LOW32, seed >> _32)), counter)
    coins = ((first >> np.uint64(5)) << np.uint64(26)) + (second >> np.uint64(6))
    return torch.from_numpy(coins.reshape(shape) * 2.0**-53).to(seeds.device)


def _describe(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
