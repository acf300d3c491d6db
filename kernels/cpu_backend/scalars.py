"""C expressions of elementwise operations, on the scalars of one element."""

from __future__ import annotations

from collections.abc import Callable

from .elements import HELD, SIZES, UNSIGNED, bitcast, constant, rounded
from .ir import Op, Value

# Views change which element is meant, not what it is.
VIEWS = {"tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.unsplat"}
FREE = VIEWS | {
    "tt.make_range", "arith.constant", "tt.addptr", "tt.bitcast", "arith.bitcast", "arith.extf",
    "ub.poison",
}  # fmt: skip
_ELEMENTWISE = {
    "tt.join", "tt.split", "tt.mulhiui", "tt.fp_to_fp", "tt.ptr_to_int", "tt.int_to_ptr",
    "tt.clampf", "tt.precise_divf", "tt.precise_sqrt", "tt.gather", "tt.extern_elementwise",
}  # fmt: skip
# What an operation costs, in additions (1 where it is not named).
_COSTS = {
    "math.exp": 8, "math.exp2": 8, "math.log": 8, "math.log2": 8, "math.sin": 20, "math.cos": 20,
    "math.erf": 20, "math.sqrt": 4, "math.rsqrt": 5, "math.tanh": 20, "arith.divf": 4,
    "tt.precise_divf": 4, "tt.precise_sqrt": 4, "arith.divsi": 8, "arith.remsi": 8,
    "arith.divui": 8, "arith.remui": 8, "tt.mulhiui": 3, "tt.extern_elementwise": 15,
    "tt.gather": 3, "tt.fp_to_fp": 2,
}  # fmt: skip


def is_elementwise(op: Op) -> bool:
    """Each element of the result depends on given elements of the operands, and nothing else."""
    return op.name in _ELEMENTWISE or op.name in FREE or op.name.startswith(("arith.", "math."))


def cost(op: Op) -> int:
    return 0 if op.name in FREE else _COSTS.get(op.name, 1)


def expression(op: Op, args: list[str], result: Value) -> str:
    """C expression of an element of `result`; `args` are the operands' elements.

    Raises:
        NotImplementedError: the operation is not known.
    """
    dialect, _, name = op.name.partition(".")
    table = {"arith": _ARITH, "math": _MATH, "tt": _TT}.get(dialect, {})
    if op.name == "ub.poison":
        return "0"
    if name not in table:
        raise NotImplementedError(f"the operation {op.name}")
    return table[name](op, args, result.type.elem)


def _source(op: Op) -> str:
    return op.operands[0].type.elem


# ---------------------------------------------------------------------- arith
def _integers(sign: str) -> Callable:
    def write(op: Op, args: list[str], elem: str) -> str:
        e = f"({args[0]} {sign} {args[1]})"
        return f"(_Bool)({e} & 1)" if elem == "i1" else f"({HELD[elem]}){e}"

    return write


def _floats(sign: str) -> Callable:
    return lambda op, args, elem: rounded(elem, f"({args[0]} {sign} {args[1]})")


def _called(stem: str) -> Callable:
    """A function of prelude.h for each width."""
    return lambda op, args, elem: f"tc_{stem}_{elem}({args[0]}, {args[1]})"


def _chosen(sign: str, unsigned: bool) -> Callable:
    def write(op: Op, args: list[str], elem: str) -> str:
        a, b = args
        # Signed, the true of one bit is -1.
        cast = f"({UNSIGNED[elem]})" if unsigned else "-" if elem == "i1" else ""
        return f"({cast}{a} {sign} {cast}{b} ? {a} : {b})"

    return write


def _chosen_float(sign: str, nan_of: str) -> Callable:
    """The larger or smaller; `nan_of`: "a" hands NaN on, "b" ignores one."""

    def write(op: Op, args: list[str], elem: str) -> str:
        a, b = args
        x = a if nan_of == "a" else b
        return f"((({a} {sign} {b}) | ({x} != {x})) ? {a} : {b})"

    return write


_FLOAT_PREDICATES = {
    "oeq": "({0} == {1})", "ogt": "({0} > {1})", "oge": "({0} >= {1})", "olt": "({0} < {1})",
    "ole": "({0} <= {1})", "one": "(({0} < {1}) | ({0} > {1}))",
    "ord": "(({0} == {0}) & ({1} == {1}))", "uno": "(({0} != {0}) | ({1} != {1}))",
    "ueq": "(!(({0} < {1}) | ({0} > {1})))", "ugt": "(!({0} <= {1}))", "uge": "(!({0} < {1}))",
    "ult": "(!({0} >= {1}))", "ule": "(!({0} > {1}))", "une": "({0} != {1})",
    "true": "1", "false": "0",
}  # fmt: skip
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _cmpi(op: Op, args: list[str], elem: str) -> str:
    predicate, source = op.attrs["predicate"], _source(op)
    sign = _SIGNS[predicate[-2:]]
    if predicate[0] == "u" and source != "ptr":
        unsigned = UNSIGNED[source]
        return f"(({unsigned}){args[0]} {sign} ({unsigned}){args[1]})"
    if predicate[0] == "s" and source == "i1":
        return f"(-(int){args[0]} {sign} -(int){args[1]})"
    return f"({args[0]} {sign} {args[1]})"


def _signed(op: Op, args: list[str], elem: str) -> str:
    """To a wider integer or a float; the true of one bit is -1."""
    e = f"(-({HELD[elem]}){args[0]})" if _source(op) == "i1" else f"({HELD[elem]}){args[0]}"
    return rounded(elem, e)


def _leads_to_address(value: Value) -> bool:
    """An offset or the index of a gather is computed from elements of this tensor."""
    seen, waiting = {value}, [value]
    while waiting:
        for use in waiting.pop().uses:
            if use.name in ("tt.addptr", "tt.gather"):
                return True
            new = {r for r in use.results if is_elementwise(use) and r not in seen}
            seen |= new
            waiting += new
    return False


def _unsigned(op: Op, args: list[str], elem: str) -> str:
    result, bit = op.results[0], _source(op) == "i1" and op.name == "arith.extui"
    if bit and result.type.is_tensor and _leads_to_address(result):  # see TC_ONE in prelude.h
        return f"(({HELD[elem]}){args[0]} & ({HELD[elem]})tc_one)"
    return rounded(elem, f"({HELD[elem]})({UNSIGNED[_source(op)]}){args[0]}")


def _cast(op: Op, args: list[str], elem: str) -> str:
    return f"({HELD[elem]}){args[0]}"


def _fptosi(op: Op, args: list[str], elem: str) -> str:
    return f"({args[0]} != 0)" if elem == "i1" else f"({HELD[elem]}){args[0]}"


_ARITH: dict[str, Callable] = {
    "constant": lambda op, args, elem: constant(op, elem),
    "addi": _integers("+"), "subi": _integers("-"), "muli": _integers("*"),
    "andi": _integers("&"), "ori": _integers("|"), "xori": _integers("^"),
    "addf": _floats("+"), "subf": _floats("-"), "mulf": _floats("*"), "divf": _floats("/"),
    "cmpf": lambda op, args, elem: _FLOAT_PREDICATES[op.attrs["predicate"]].format(*args),
    "cmpi": _cmpi,
    "select": lambda op, args, elem: f"({args[0]} ? {args[1]} : {args[2]})",
    "extsi": _signed, "sitofp": _signed, "extui": _unsigned, "uitofp": _unsigned,
    "extf": _cast, "index_cast": _cast, "fptosi": _fptosi,
    "trunci": lambda op, args, elem:
        f"(_Bool)({args[0]} & 1)" if elem == "i1" else f"({HELD[elem]}){args[0]}",
    "fptoui": lambda op, args, elem: f"({HELD[elem]})({UNSIGNED[elem]}){args[0]}",
    "truncf": lambda op, args, elem: rounded(elem, f"(float){args[0]}"),
    "negf": lambda op, args, elem: f"(-{args[0]})",
    "maxsi": _chosen(">", False), "minsi": _chosen("<", False),
    "maxui": _chosen(">", True), "minui": _chosen("<", True),
    "maxnumf": _chosen_float(">", "b"), "minnumf": _chosen_float("<", "b"),
    "maximumf": _chosen_float(">", "a"), "minimumf": _chosen_float("<", "a"),
    **{name: _called(name) for name in (
        "divsi", "remsi", "divui", "remui", "shli", "shrsi", "shrui")},
    "remf": lambda op, args, elem:
        rounded(elem, f"fmod{'f' * (elem != 'f64')}({args[0]}, {args[1]})"),
    "bitcast": lambda op, args, elem: bitcast(_source(op), elem, args[0]),
}  # fmt: skip


# ---------------------------------------------------------------------- math
_FUNCTIONS = {
    "exp": ("tc_expf", "exp"), "exp2": ("tc_exp2f", "exp2"), "log": ("tc_logf", "log"),
    "log2": ("tc_log2f", "log2"), "rsqrt": ("tc_rsqrtf", "tc_rsqrt"),
    "absf": ("__builtin_fabsf", "__builtin_fabs"), "roundeven": ("rintf", "rint"),
    "powf": ("powf", "pow"),
    **{name: (f"__builtin_{name}f", f"__builtin_{name}") for name in (
        "sqrt", "floor", "ceil", "fma", "trunc", "round")},
    **{name: (f"{name}f", name) for name in (
        "sin", "cos", "tanh", "erf", "log1p", "expm1", "log10")},
}  # fmt: skip


def _function(name: str) -> Callable:
    single, double = _FUNCTIONS[name]
    return lambda op, args, elem: rounded(
        elem, f"{double if elem == 'f64' else single}({', '.join(args)})"
    )


_MATH: dict[str, Callable] = {
    **{name: _function(name) for name in _FUNCTIONS},
    "absi": lambda op, args, elem: f"({HELD[elem]})({args[0]} < 0 ? -{args[0]} : {args[0]})",
}


# ---------------------------------------------------------------------- tt
def _addptr(op: Op, args: list[str], elem: str) -> str:
    return f"({args[0]} + (int64_t){args[1]} * {SIZES[op.results[0].type.pointed]})"


def _fp_to_fp(op: Op, args: list[str], elem: str) -> str:
    if elem in ("f32", "f64"):
        return f"({HELD[elem]}){args[0]}"
    if "rtz" in op.text:
        if elem != "bf16":
            raise NotImplementedError(f"rounding to zero into {elem}")
        return f"tc_bf16_rtz((float){args[0]})"
    return rounded(elem, f"(float){args[0]}")


def _clampf(op: Op, args: list[str], elem: str) -> str:
    x, low, high = args
    # A NaN stays one where it is propagated; fmin(fmax(x, low), high) gives low.
    propagates = "all" in op.text.split("propagateNan")[-1][:12]
    keep = f"({x} != {x}) ? {x} : " if propagates else ""
    return f"({keep}({x} > {low} ? ({x} < {high} ? {x} : {high}) : {low}))"


_TT: dict[str, Callable] = {
    "splat": lambda op, args, elem: args[0],
    "addptr": _addptr,
    "bitcast": lambda op, args, elem:
        args[0] if elem == "ptr" else bitcast(_source(op), elem, args[0]),
    "ptr_to_int": lambda op, args, elem: f"({HELD[elem]})(intptr_t){args[0]}",
    "int_to_ptr": lambda op, args, elem: f"(char*)(intptr_t){args[0]}",
    "fp_to_fp": _fp_to_fp,
    "mulhiui": lambda op, args, elem: f"tc_mulhi_{elem}({args[0]}, {args[1]})",
    "clampf": _clampf,
    "precise_divf": lambda op, args, elem: f"({args[0]} / {args[1]})",
    "precise_sqrt": lambda op, args, elem: f"__builtin_sqrtf({args[0]})",
    "extern_elementwise": lambda op, args, elem: f"{op.attrs['symbol']}({', '.join(args)})",
}  # fmt: skip
