"""Triton's interpreter (TRITON_INTERPRET=1): two repairs, and counts of bytes.

Comparisons of Triton 3.9.0's interpreter keep their operands' dtype, so a mask made from scalars is
refused ("mask has unsupported dtype"), and its functions of libdevice return None.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.runtime import interpreter

_LIBDEVICE = {"log1p": np.log1p, "isnan": np.isnan, "fast_expf": np.exp, "fast_logf": np.log}


def repair() -> None:
    """Patch the interpreter; later calls change nothing."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Set TRITON_INTERPRET=1 before triton is imported.")
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "comparisons_are_bool", False):
        return
    for name in [n for n in dir(builder) if n.startswith(("create_icmp", "create_fcmp"))]:
        setattr(builder, name, _as_bool(getattr(builder, name)))
    builder.comparisons_are_bool = True
    for name, function in _LIBDEVICE.items():
        if hasattr(libdevice, name):
            setattr(libdevice, name, _elementwise(function))
    # Kernels meet NaN, infinities and wrapping integers on purpose.
    np.seterr(all="ignore")


@contextmanager
def count_bytes() -> Iterator[Counter]:
    """Bytes of unmasked lanes "loaded" and "stored" (atomics: both) by kernels in the context.

    Also their "launches", and the "most loads" of one program, one after another.
    """
    counts: Counter = Counter()
    loads: Counter = Counter()
    builder = interpreter.InterpreterBuilder
    executor = interpreter.GridExecutor
    before_load, before_store = builder.create_masked_load, builder.create_masked_store
    before_atomic, call = builder.create_atomic_rmw, executor.__call__

    def load(self, ptrs, mask, *rest):
        counts["loaded"] += int(mask.data.sum()) * _width(ptrs)
        program = counts["launches"], self.grid_idx
        loads[program] += 1
        counts["most loads"] = max(counts["most loads"], loads[program])
        return before_load(self, ptrs, mask, *rest)

    def store(self, ptrs, value, mask, *rest):
        counts["stored"] += int(mask.data.sum()) * _width(ptrs)
        return before_store(self, ptrs, value, mask, *rest)

    def atomic(self, operation, ptr, value, mask, *rest):
        size = int(mask.data.sum()) * _width(ptr)
        counts.update(loaded=size, stored=size)
        return before_atomic(self, operation, ptr, value, mask, *rest)

    def launch(self, *args, **kwargs):
        counts["launches"] += 1
        return call(self, *args, **kwargs)

    with (
        mock.patch.multiple(builder, create_masked_load=load, create_masked_store=store),
        mock.patch.object(builder, "create_atomic_rmw", atomic),
        mock.patch.object(executor, "__call__", launch),
    ):
        yield counts


def _width(pointers) -> int:
    return pointers.get_element_ty().primitive_bitwidth // 8


def _as_bool(compare):
    def compared(self, lhs, rhs):
        result = compare(self, lhs, rhs)
        return interpreter.TensorHandle(np.asarray(result.data).astype(np.bool_), tl.int1)

    return compared


def _elementwise(function):
    def apply(value, _semantic=None):
        value = interpreter.interpreter_semantic.to_tensor(value)
        data = function(value.handle.data)
        dtype = tl.int1 if data.dtype == np.bool_ else value.dtype.scalar
        out_type = tl.block_type(dtype, value.type.shape) if value.type.is_block() else dtype
        return tl.tensor(interpreter.TensorHandle(data, dtype), out_type)

    return apply
