"""The compiler of the backend: Triton's own passes that know no target, C, a shared object."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

from triton._C.libtriton import ir, passes
from triton.backends import compiler as base

from . import checks, toolchain


@dataclass(frozen=True)
class CPUOptions:
    """Options of kernels that matter to a CPU, and those that Triton itself reads.

    What tells a GPU how to run a kernel (`num_warps`, ...) keeps one value, so that it makes no
    variants.

    Attributes:
        bounds: see `checks`.
        flags: of the C compiler.
    """

    bounds: bool = False
    flags: str = ""
    num_warps: int = 4
    num_ctas: int = 1
    num_stages: int = 3
    warp_size: int = 1
    debug: bool = False
    enable_fp_fusion: bool = False
    launch_cooperative_grid: bool = False
    sanitize_overflow: bool = False
    arch: str = "native"
    backend_name: str = "cpu"
    ir_override: str | None = None
    extern_libs: tuple | None = None
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    instrumentation_mode: str = ""
    fpsan_homomorphic_casts: bool = False
    # Of GPUs: taken, for Triton refuses options that have no name here, and ignored.
    maxnreg: int | None = None
    ptx_version: int | None = None
    ptx_options: str | None = None
    launch_pdl: bool = False
    disable_licm: bool = False
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1

    def hash(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


# Options that change what is compiled.
_USED = {"debug", "instrumentation_mode", "fpsan_homomorphic_casts"}
# What may be given at a launch and changes nothing here.
IGNORED = frozenset(field.name for field in fields(CPUOptions)) - _USED - {"bounds", "flags"}


class CPUBackend(base.BaseBackend):
    """Compiles for the target "cpu"."""

    def __init__(self, target: base.GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "so"

    @staticmethod
    def supports_target(target: base.GPUTarget) -> bool:
        return target.backend == "cpu"

    @staticmethod
    def parse_attr(desc: str) -> list:
        return []  # alignment would only make more variants of a kernel

    def hash(self) -> str:
        return toolchain.identity()

    def parse_options(self, options: dict) -> CPUOptions:
        bounds = checks.ACTIVE.bounds
        given = {key: value for key, value in options.items() if key in _USED and value is not None}
        return CPUOptions(bounds=bounds, flags=toolchain.flags(bounds), **given)

    def pack_metadata(self, metadata) -> tuple:
        return ()

    def get_codegen_implementation(self, options: CPUOptions) -> dict:
        def no_custom_types(*args, **kwargs):
            raise NotImplementedError("elements of type fp8e4b15 have no form on a CPU")

        return {
            "convert_custom_types": no_custom_types,
            "min_dot_size": lambda lhs, rhs: (1, 1, 1),
        }

    def get_module_map(self) -> dict[str, ModuleType]:
        # prelude.h has what these functions are called.
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, context) -> None:
        pass

    def add_stages(self, stages: dict, options: CPUOptions, language=None) -> None:
        stages["ttir"] = lambda module, metadata: optimized(module)
        stages["c"] = c_of_module
        stages["so"] = shared_object


def optimized(module):
    """Triton's passes before any target is known."""
    manager = ir.pass_manager(module.context)
    passes.common.add_inliner(manager)
    passes.ttir.add_rewrite_tensor_descriptor_to_pointer(manager)
    passes.common.add_canonicalizer(manager)
    passes.ttir.add_combine(manager)
    passes.ttir.add_reorder_broadcast(manager)
    passes.common.add_cse(manager)
    passes.common.add_licm(manager)
    passes.common.add_symbol_dce(manager)
    passes.ttir.add_loop_unroll(manager)
    manager.run(module, "make_ttir")
    return module


def c_of_module(module, metadata: dict) -> str:
    """The C source of a module's kernel.

    Raises:
        Unsupported: an operation is not known; names the kernel, the file and the line.
    """
    # A server that finds its kernels in the cache needs neither.
    from . import codegen, parser

    functions = parser.parse(str(module))
    metadata.update(name=functions[0].name, shared=0)
    return codegen.c_source(functions, bounds=metadata["bounds"])


def shared_object(source: str, metadata: dict) -> bytes:
    """The compiled kernel; its text is the same for kernels that differ in their names only."""
    return Path(toolchain.build(source, metadata["name"], metadata["flags"])).read_bytes()
