"""Triton's interpreter (TRITON_INTERPRET=1): repairs, and counts of bytes and of loads.

Triton 3.9.0's interpreter needs two repairs. Comparisons keep their operands' dtype, so a mask
made from scalars is refused ("mask has unsupported dtype"), and functions of libdevice return
None. It also patches the language again at every call of a device function, which took half of
the time, builds the same few types for every operation, which took a third of the rest, and checks
operands that are alike, and constants that it has met, as if they were others: half of that.
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

# Equal types of these take part in every operation as they are.
_PLAIN = {"int1", "int32", "uint32", "int64", "uint64", "fp32", "fp64"}
_LIBDEVICE = {"log1p": np.log1p, "isnan": np.isnan, "fast_expf": np.exp, "fast_logf": np.log}


def repair() -> None:
    """Patch the interpreter; later calls change nothing.

    Raises:
        RuntimeError: TRITON_INTERPRET is not 1, so the kernels are not interpreted.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Set TRITON_INTERPRET=1 before triton is imported.")
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "comparisons_are_bool", False):
        return
    for name in [n for n in dir(builder) if n.startswith(("create_icmp", "create_fcmp"))]:
        setattr(builder, name, _as_bool(getattr(builder, name)))
    builder.comparisons_are_bool = True
    # What it computes asserts nothing unless the interpreter debugs.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    semantic = interpreter.TritonSemantic
    semantic.binary_op_type_checking_impl = _operands(semantic.binary_op_type_checking_impl)
    interpreter._validate_np_data_size = _fits(interpreter._validate_np_data_size)
    for name, function in _LIBDEVICE.items():
        if hasattr(libdevice, name):
            setattr(libdevice, name, _elementwise(function))
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _numpy_type(interpreter._get_np_dtype)
    tl.block_type.__init__ = _block_types(tl.block_type.__init__)
    tl.tensor.__init__ = _tensors(tl.tensor.__init__)
    # Kernels meet NaN, infinities and wrapping integers on purpose.
    np.seterr(all="ignore")


@contextmanager
def count_bytes() -> Iterator[Counter]:
    """Count the bytes of unmasked lanes that kernels load and store within the context.

    Yields:
        A Counter with "loaded", "stored" (bytes; an atomic counts as both) and "launches".
    """
    counts: Counter = Counter()
    builder = interpreter.InterpreterBuilder
    executor = interpreter.GridExecutor
    before_load, before_store = builder.create_masked_load, builder.create_masked_store
    before_atomic, call = builder.create_atomic_rmw, executor.__call__

    def load(self, ptrs, mask, *rest):
        counts["loaded"] += int(mask.data.sum()) * _width(ptrs)
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

    with interpreted_by(load, store, atomic, launch):
        yield counts


@contextmanager
def count_loads() -> Iterator[Counter]:
    """Count the loads that a program executes within the context, one after another.

    Yields:
        A Counter with those of each kernel's longest program.
    """
    longest: Counter = Counter()
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, begin, call = builder.create_masked_load, builder.set_grid_idx, executor.__call__
    kernel, count = "", 0

    def counted(self, *args):
        nonlocal count
        count += 1
        longest[kernel] = max(longest[kernel], count)
        return load(self, *args)

    def begun(self, *place):
        nonlocal count
        count = 0
        return begin(self, *place)

    def launch(self, *args, **kwargs):
        nonlocal kernel
        kernel = self.fn.__name__
        return call(self, *args, **kwargs)

    with (
        mock.patch.multiple(builder, create_masked_load=counted, set_grid_idx=begun),
        mock.patch.object(executor, "__call__", launch),
    ):
        yield longest


@contextmanager
def interpreted_by(load, store, atomic, launch) -> Iterator[None]:
    """Replace what the interpreter does for loads, stores, atomics and launches of kernels."""
    operations = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": atomic,
    }
    with (
        mock.patch.multiple(interpreter.InterpreterBuilder, **operations),
        mock.patch.object(interpreter.GridExecutor, "__call__", launch),
    ):
        yield


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


def _numpy_type(find):
    known = {}

    def found(tt_dtype):
        scalar = tt_dtype.scalar
        if scalar.name not in known:
            known[scalar.name] = find(scalar)
        return known[scalar.name]

    return found


def _block_types(make):
    known = {}

    def init(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = self.__dict__
        self.__dict__ = known[key]

    return init


def _tensors(make):
    known = {}

    def init(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in known:
            make(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return init


def _operands(check):
    known = {}

    def checked(self, lhs, rhs, *args, **kwargs):
        if type(lhs) is not tl.tensor or lhs.dtype.name not in _PLAIN:
            return check(self, lhs, rhs, *args, **kwargs)
        if type(rhs) is tl.tensor and lhs.dtype.name == rhs.dtype.name:
            if lhs.type.name == rhs.type.name:
                return lhs, rhs
            return self.broadcast_impl_value(lhs, rhs)
        if type(rhs) not in (int, float):
            return check(self, lhs, rhs, *args, **kwargs)
        key = lhs.type.name, repr(rhs), args, *kwargs.items()
        if key in known:
            return lhs, known[key]
        given, constant = check(self, lhs, rhs, *args, **kwargs)
        if given is lhs:
            constant.handle.data.flags.writeable = False
            known[key] = constant
        return given, constant

    return checked


def _fits(check):
    known = {}

    def fits(array, dtype):
        key = array.dtype, dtype.name
        if key not in known:
            known[key] = check(array, dtype)
        return known[key]

    return fits


def _patch_once(patch):
    seen = set()

    def patched(fn):
        if id(fn.__globals__) not in seen:
            patch(fn)
            seen.add(id(fn.__globals__))
        return interpreter._LangPatchScope()

    return patched
