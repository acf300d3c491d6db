"""Copies of finished requests' outputs, in which suffix lookups of other requests look.

cascade/shared_outputs.py launches it.
"""

import triton
import triton.language as tl


# As many requests end in a step as happens.
@triton.jit(do_not_specialize=["count"])
def share_outputs_kernel(
    shared_ptr,  # int32 [limit], outputs with -1 after each, the oldest overwritten first
    next_ptr,  # int64 [1], where the next output goes
    slot_ptr,  # int32 [count], of the requests
    begin_ptr,  # int32 [count], where their outputs begin in their texts
    length_ptr,  # int32 [max_num_reqs], of the texts
    text_ptr,  # int32 [max_num_reqs, max_model_len]
    text_stride,
    limit,
    count,
    CHUNK: tl.constexpr,
):
    """One program, because every output goes after the one before."""
    place = tl.load(next_ptr)
    request = tl.zeros((), tl.int32)
    while request < count:
        slot = tl.load(slot_ptr + request).to(tl.int64)
        end = tl.load(length_ptr + slot)
        # The last tokens of an output that is longer than all memory.
        begin = tl.maximum(tl.load(begin_ptr + request), end - (limit - 1))
        at = begin
        while at < end:
            position = at + tl.arange(0, CHUNK)
            inside = position < end
            token = tl.load(text_ptr + slot * text_stride + position, mask=inside)
            tl.store(shared_ptr + (place + position - begin) % limit, token, mask=inside)
            at += CHUNK
        if begin < end:
            place = (place + end - begin) % limit
            tl.store(shared_ptr + place, -1)
            place = (place + 1) % limit
        # The next output may lie on this one.
        tl.debug_barrier()
        request += 1
    tl.store(next_ptr, place)
