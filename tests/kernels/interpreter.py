"""Repairs to Triton's interpreter (3.9.0), needed where a kernel runs without a GPU.

Comparisons come back with their operands' dtype, so a mask made from scalars is refused ("mask
has unsupported dtype"); functions of libdevice come back as None. Both are given their meaning.
The language is patched once a process, not at every call of a device function (half the time).
"""

import numpy as np
import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.runtime import interpreter

_LIBDEVICE = {"log1p": np.log1p, "isnan": np.isnan, "fast_expf": np.exp, "fast_logf": np.log}


def repair() -> None:
    """Patch the interpreter once; later calls change nothing."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "comparisons_are_bool", False):
        return
    for name in [n for n in dir(builder) if n.startswith(("create_icmp", "create_fcmp"))]:
        setattr(builder, name, _as_bool(getattr(builder, name)))
    builder.comparisons_are_bool = True
    for name, function in _LIBDEVICE.items():
        if hasattr(libdevice, name):
            setattr(libdevice, name, _elementwise(function))
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)


def _patch_once(patch):
    seen = set()

    def patched(fn):
        if id(fn.__globals__) not in seen:
            patch(fn)
            seen.add(id(fn.__globals__))
        return interpreter._LangPatchScope()

    return patched


def _as_bool(compare):
    def compared(self, lhs, rhs):
        result = compare(self, lhs, rhs)
        return interpreter.TensorHandle(np.asarray(result.data).astype(np.bool_), tl.int1)

    return compared


def _elementwise(function):
    def apply(value, _semantic=None):
        value = interpreter.interpreter_semantic.to_tensor(value)
        with np.errstate(all="ignore"):
            data = function(value.handle.data)
        dtype = tl.int1 if data.dtype == np.bool_ else value.dtype.scalar
        shape = value.type.shape if value.type.is_block() else ()
        out_type = tl.block_type(dtype, shape) if shape else dtype
        return tl.tensor(interpreter.TensorHandle(data, dtype), out_type)

    return apply
