"""Counter-based uniforms inside kernels: the same numbers as ``vllm_hsd.verify.uniforms``.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011) with key = request seed (64 bits) and counter = (draw low, draw high, stream, 0).
``vllm_hsd.verify.rng`` says which stream and draw a level uses for what.
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
