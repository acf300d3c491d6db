"""Device code shared by lookups: the tokens of a request's text.

Its committed part is where the runner keeps it, the rest, which may be unverified, in the window.
"""

import triton
import triton.language as tl


@triton.jit
def token_at(window_ptr, text_ptr, base, at, mask):
    """Tokens of a request's text, of the window where that begins; -1 where the mask is false."""
    one = tl.load(window_ptr + at - base, mask=mask & (at >= base), other=-1)
    other = tl.load(text_ptr + at, mask=mask & (at < base), other=-1)
    return tl.where(at >= base, one, other)


@triton.jit
def searched_at(searched_ptr, window_ptr, text_ptr, base, at, mask):
    """As `token_at`, of another text unless its pointer is None."""
    if searched_ptr is None:
        token = token_at(window_ptr, text_ptr, base, at, mask)
    else:
        token = tl.load(searched_ptr + at, mask=mask, other=-1)
    return token


@triton.jit
def matched_tokens(
    window_ptr,
    text_ptr,
    base,
    length,
    position,
    going,
    most,
    CHUNK: tl.constexpr,
    searched_ptr=None,
):
    """How many tokens up to each of [CHUNK] positions, `most` at most, end the text too: int32.

    Pointers are at the request's; base and length as in `token_at`; only positions that are
    `going` are looked at, in the text itself or in another one.
    """
    matched = tl.zeros([CHUNK], tl.int32)
    i = tl.zeros((), tl.int64)
    while (i < most) & (tl.max(going.to(tl.int32), axis=0) > 0):
        wanted = token_at(window_ptr, text_ptr, base, length - 1 - i, length > i)
        at = position - i
        going = going & (at >= 0)
        token = searched_at(searched_ptr, window_ptr, text_ptr, base, at, going)
        going = going & (token == wanted)
        matched += going.to(tl.int32)
        i += 1
    return matched
