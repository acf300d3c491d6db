"""Counter-based uniforms inside kernels: the same numbers as ``vllm_hsd.verify.uniforms``.

Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC
2011) with key = request seed (64 bits) and counter = (draw low, draw high, stream, 0). A uniform
belongs to (seed, stream, draw). The position in the sequence does not enter, because a rejected
position is drawn again by the next call.
"""

import triton
import triton.language as tl

# Purposes of a stream. DRAFT: a proposed token. ACCEPT: one uniform per draft token. NEXT: the
# recovered or bonus token after the accepted prefix.
DRAFT, ACCEPT, NEXT = range(3)
_PURPOSES = 4


def stream_id(level: int, purpose: int) -> int:
    """Stream of the uniforms that ``level`` uses for ``purpose`` (DRAFT, ACCEPT or NEXT).

    Raises:
        ValueError: level outside [0, 2**24).
    """
    if not 0 <= level < 2**24:
        raise ValueError(f"level must be in [0, 2**24), got {level}.")
    return level * _PURPOSES + purpose


@triton.jit
def uniform(seed, stream, draw):
    """float64 in [0, 1) with 53 random bits; seed: int64 scalar, draw: int64 scalar or tensor."""
    low = (draw & 0xFFFFFFFF).to(tl.uint32)
    high = ((draw >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, low * 0 + stream, low * 0)
    return ((first >> 5).to(tl.float64) * 67108864.0 + (second >> 6).to(tl.float64)) * (2.0**-53)
