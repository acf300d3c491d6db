"""Counter-based uniforms inside kernels: the same numbers as ``vllm_hsd.rules.rng.host_uniforms``.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011) with key = request seed (64 bits) and counter = (draw low, draw high, stream, 0).
``vllm_hsd.rules.rng`` says which stream and draw a level uses for what.
"""

import triton
import triton.language as tl


def stream_of(level: int, lowest: int = 0) -> int:
    """Stream of a level's uniforms: its number.

    Args:
        level: the level; the target's is the number of levels.
        lowest: 1 where the level verifies.

    Raises:
        ValueError: level outside [lowest, 2**31).
    """
    if not lowest <= level < 2**31:
        raise ValueError(f"level must be in [{lowest}, 2**31), got {level}.")
    return level


@triton.jit
def uniform(seed, stream, draw):
    """float64 in [0, 1) with 53 random bits; seed: int64 scalar, draw: int64 scalar or tensor."""
    low = (draw & 0xFFFFFFFF).to(tl.uint32)
    high = ((draw >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0 + stream, low * 0)
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) * (2.0**-53)


@triton.jit
def _rotated(value, shift: tl.constexpr):
    return (value << shift) | (value >> (32 - shift))


@triton.jit
def _mixed(h, key):
    key = _rotated(key * 0xCC9E2D51, 15) * 0x1B873593
    return _rotated(h ^ key, 13) * 5 + 0xE6546B64


@triton.jit
def gumbel(seed, position, token):
    """Gumbel noise of vLLM's V2 runner, float32, bit for bit (``v1/worker/gpu/sample/gumbel.py``).

    A MurmurHash3 of (seed, position, token) gives a uniform of 32 bits. vLLM draws the token after
    position i of the text with position = i, as the argmax of logits / temperature + noise.

    seed, position: int64 scalars; token: int32 tensor.
    """
    h = _mixed((seed ^ seed).to(tl.uint32), (seed & 0xFFFFFFFF).to(tl.uint32))
    h = _mixed(h, ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    h = _mixed(h, (position & 0xFFFFFFFF).to(tl.uint32))
    h = _mixed(h, token.to(tl.uint32)) ^ 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h ^= h >> 16
    high = (h >> 16).to(tl.int32).to(tl.float32)
    low = (h & 0xFFFF).to(tl.int32).to(tl.float32)
    u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    # log(1 - u): near 0, where the largest noise comes from, as a series of degree 8.
    series = 1.0 / 7.0 + u * (1.0 / 8.0)
    series = 1.0 / 6.0 + u * series
    series = 1.0 / 5.0 + u * series
    series = 1.0 / 4.0 + u * series
    series = 1.0 / 3.0 + u * series
    series = 1.0 / 2.0 + u * series
    series = -u * (1.0 + u * series)
    direct = tl.log(tl.maximum(1.0 - u, 5.960464477539063e-08))
    return -tl.log(-tl.where(u < 0.25, series, direct))
