"""Element types in C: how they are held in registers and arrays, and how in memory.

Narrow floats are held as `float` and rounded after every operation, so that C computes with them.
"""

from __future__ import annotations

import math
import struct

from .ir import Op, Type

HELD = {
    "i1": "_Bool", "i8": "int8_t", "i16": "int16_t", "i32": "int32_t", "i64": "int64_t",
    "f16": "float", "bf16": "float", "f32": "float", "f64": "double", "ptr": "char*",
    "f8E4M3FN": "float", "f8E5M2": "float",
}  # fmt: skip
IN_MEMORY = {
    **HELD, "i1": "uint8_t", "f16": "_Float16", "bf16": "uint16_t",
    "f8E4M3FN": "uint8_t", "f8E5M2": "uint8_t",
}  # fmt: skip
SIZES = {
    "i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
    "ptr": 8, "f8E4M3FN": 1, "f8E5M2": 1,
}  # fmt: skip
# Stems of the functions in prelude.h that round, load and store.
NARROW = {"f16": "tc_f16", "bf16": "tc_bf16", "f8E4M3FN": "tc_e4m3", "f8E5M2": "tc_e5m2"}
UNSIGNED = {
    "i1": "_Bool", "i8": "uint8_t", "i16": "uint16_t", "i32": "uint32_t", "i64": "uint64_t",
}  # fmt: skip
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}


def held(type: Type) -> str:
    """The C type of an element in a register or array.

    Raises:
        NotImplementedError: the element type is not known.
    """
    if type.elem not in HELD:
        raise NotImplementedError(f"elements of type {type.elem}")
    return HELD[type.elem]


def rounded(elem: str, e: str) -> str:
    """`e`, computed in float, rounded to a narrow type."""
    return f"{NARROW[elem]}({e})" if elem in NARROW else e


def loaded(elem: str, place: str) -> str:
    """The element at a C lvalue, as it is held."""
    if elem == "bf16":
        return f"tc_from_bf16({place})"
    if elem == "f16":
        return f"(float)({place})"
    if elem == "i1":
        return f"(({place}) != 0)"
    return f"{NARROW[elem]}_load({place})" if elem in NARROW else f"({place})"


def stored(elem: str, e: str) -> str:
    """A held element as it is in memory."""
    if elem == "bf16":
        return f"tc_to_bf16({e})"
    if elem == "f16":
        return f"(_Float16)({e})"
    return f"{NARROW[elem]}_store({e})" if elem in NARROW else e


def bitcast(source: str, elem: str, e: str) -> str:
    if source == elem:
        return e
    if {source, elem} <= set(BITS):
        return f"({HELD[elem]}){e}"
    return f"tc_bits_{source}_{elem}({e})"


def from_slot(elem: str, slot: str) -> str:
    """A scalar argument out of the 64 bits that the launcher passes."""
    if elem == "ptr":
        return f"(char*)(uintptr_t){slot}"
    if elem == "f64":
        return f"tc_bits_i64_f64((int64_t){slot})"
    if elem in BITS:
        return f"(_Bool)({slot} & 1)" if elem == "i1" else f"({HELD[elem]}){slot}"
    return rounded(elem, f"(float)tc_bits_i64_f64((int64_t){slot})")


# ---------------------------------------------------------------------- constants
def int_constant(op: Op) -> int:
    value = op.attrs["value"]
    return int(value == "true") if value in ("true", "false") else int(value, 0)


def constant(op: Op, elem: str) -> str:
    """C expression of the value of arith.constant (of tensors that have one value).

    Raises:
        NotImplementedError: the value is a list of elements.
    """
    value = op.attrs["value"]
    if elem == "i1":
        return "1" if value in ("true", "1", "-1") else "0"
    if elem == "ptr":
        return f"((char*){value})"
    try:
        return _integer(int(value, 0), elem) if elem in BITS else _float(value, elem)
    except ValueError:
        raise NotImplementedError("constants of several values") from None


def _integer(n: int, elem: str) -> str:
    bits, suffix = BITS[elem], "L" if elem == "i64" else ""
    if n >= 1 << (bits - 1):
        n -= 1 << bits
    if n == -(1 << (bits - 1)):  # C has no literal of it
        return f"(({HELD[elem]})({n + 1}{suffix} - 1))"
    return f"(({HELD[elem]}){n}{suffix})"


def _float(value: str, elem: str) -> str:
    cast = "(double)" if elem == "f64" else ""
    x = _from_bits(int(value, 16), elem) if value.lower().startswith("0x") else float(value)
    if math.isnan(x):
        return f"({cast}NAN)"
    if math.isinf(x):
        return f"({cast}{'-' * (x < 0)}INFINITY)"
    if elem == "f64":
        return f"({x.hex()})"
    return f"({struct.unpack('<f', struct.pack('<f', x))[0].hex()}f)"


def _from_bits(n: int, elem: str) -> float:
    kind, bits = {
        "f64": ("<d", struct.pack("<Q", n)),
        "f32": ("<f", struct.pack("<I", n & 0xFFFFFFFF)),
        "bf16": ("<f", struct.pack("<I", (n & 0xFFFF) << 16)),
        "f16": ("<e", struct.pack("<H", n & 0xFFFF)),
    }[elem]
    return struct.unpack(kind, bits)[0]


# ---------------------------------------------------------------------- reductions
def neutral(operation: str, elem: str) -> str:
    """The C expression that a reduction by arith.`operation` starts with."""
    if operation in ("addf", "addi", "ori", "xori"):
        return "0"
    if operation in ("mulf", "muli"):
        return "1"
    if operation == "andi":
        return "1" if elem == "i1" else "-1"
    if operation.endswith("f"):
        return "-INFINITY" if operation.startswith("max") else "INFINITY"
    low, high = -(1 << (BITS[elem] - 1)), (1 << (BITS[elem] - 1)) - 1
    if operation == "maxui":
        return "0"
    if operation == "minui":
        return "1" if elem == "i1" else "-1"
    if elem == "i1":  # signed, true is -1
        return "1" if operation == "maxsi" else "0"
    return _integer(low if operation == "maxsi" else high, elem)
