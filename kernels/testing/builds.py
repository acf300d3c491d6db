"""Ahead-of-time builds of the kernels, without a GPU: registers, spills and shared memory."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from vllm_hsd.kernels import (
    blocks,
    cascade_steps,
    chain_kernels,
    lookup_kernels,
    sample_row,
    step_kernels,
    tree_kernels,
)

_POINTERS = {
    "out_ptr": "i64",
    "path_ptr": "i64",
    "count_ptr": "i32",
    "arrived_ptr": "i32",
    "token_ptr": "i64",
    "parent_ptr": "i64",
    "cu_ptr": "i64",
    "index_ptr": "i64",
    "draft_index_ptr": "i64",
    "length_ptr": "i32",
    "seed_ptr": "i64",
    "draw_ptr": "i64",
    "target_ptr": "bf16",
    "draft_ptr": "bf16",
    "logits_ptr": "bf16",
    # Steps of a proposal.
    "rows_ptr": "bf16",
    "base_ptr": "i64",
    "limit_ptr": "i64",
    "positions_ptr": "i64",
    "slot_mapping_ptr": "i64",
    "draft_tokens_ptr": "i64",
    "counts_ptr": "i64",
    "best_ptr": "i64",
    "table_ptrs_ptr": "u64",
    "table_strides_ptr": "i64",
    "request_seed_ptr": "i64",
    **dict.fromkeys(
        (
            "num_reqs_ptr",
            "window_ptr",
            "end_ptr",
            "start_ptr",
            "drafted_ptr",
            "requested_ptr",
            "origin_ptr",
            "lengths_ptr",
            "slot_ptr",
            "row_of_slot_ptr",
            "text_ptr",
            "num_sampled_ptr",
            "input_ids_ptr",
            "seq_lens_ptr",
            "query_start_ptr",
            "sampled_ptr",
            "block_sizes_ptr",
            "accepted_ptr",
            "emitted_ptr",
            "draft_length_ptr",
            "successor_ptr",
        ),
        "i32",
    ),
}
# A vocabulary of 128,256 in bfloat16: what makes the loads 16 bytes wide.
_MULTIPLES_OF_16 = (
    "vocab_size",
    "logits_stride",
    "target_stride",
    "draft_stride_origin",
    "draft_stride_row",
)
_NARROW_LOAD = re.compile(r"ld\.global\S*\.[bu]16\s")
_ACCESS = r"{}\.global\S*?(?:\.v(\d))?\.[bsuf](\d+)\s"
_CHAIN = {"MAX_DRAFT": 8, "ROWS": 16, "PADDED": True, "HAS_LENGTH": True, "CHUNK": blocks.CHUNK}
_VERIFY = {
    **_CHAIN,
    "BLOCK_VERIFICATION": True,
    "HAS_DRAFT": True,
    "BLOCK": blocks.BLOCK,
    "CHUNKS": 16,
}
_TREE = {"NODES": 64, "LANES": 64, "CHUNK": blocks.CHUNK, "HAS_DRAFT": True}
_ROW = {"CHUNK": blocks.CHUNK, "BLOCK": blocks.BLOCK}

_COPY = {"N": 8, "CHUNK": cascade_steps.COPY_CHUNK}
_PLACE = {"LEVELS": 2, "WINDOW": 3, "LANES": 8, "COMMITTED_TOO": True}

# name -> (kernel, compile-time arguments, warps)
_STEPS = {
    "stage": (
        step_kernels.stage_kernel,
        {"DRAWS_PER_LENGTH": 1 << 16, "WINDOW": 3, "MARGIN": 2, "LANES": 4, "LEVELS": 2},
        1,
    ),
    "place_draft": (
        step_kernels.place_kernel,
        {**_PLACE, "LEVEL": 0, "VERIFIES": False, "DRAFT": 0, "QUERY": 3},
        1,
    ),
    "place_verify": (
        step_kernels.place_kernel,
        {**_PLACE, "LEVEL": 1, "VERIFIES": True, "DRAFT": 3, "QUERY": 5},
        1,
    ),
    "commit_draft": (step_kernels.commit_draft_kernel, _COPY, cascade_steps.COPY_WARPS),
    "commit_verify": (
        step_kernels.commit_verify_kernel,
        {**_COPY, "LEVEL": 1, "DRAFT": 3, "LANES": 4},
        cascade_steps.COPY_WARPS,
    ),
    "find_ngram": (
        lookup_kernels.find_ngram_kernel,
        {"LONGEST": 4, "CHUNK": cascade_steps.SEARCH_CHUNK},
        4,
    ),
    "copy_ngram": (
        lookup_kernels.copy_ngram_kernel,
        {"SHORTEST": 1, "LANES": 8, "CHUNKS": 64},
        1,
    ),
    "lookup_bigram": (lookup_kernels.lookup_bigram_kernel, {}, 1),
    "collect": (step_kernels.collect_kernel, {"WINDOW": 3, "LONGEST": 8, "LANES": 8}, 1),
}
_VERIFICATION = {
    "chain_stats": (chain_kernels.row_stats_kernel, {**_CHAIN, "READ_DRAFT": True}),
    "chain_stats_lse": (chain_kernels.row_stats_kernel, {**_CHAIN, "READ_DRAFT": False}),
    "chain_residual": (
        chain_kernels.verify_kernel,
        {**_VERIFY, "DECIDE": False, "HAS_LSE": False},
    ),
    "chain_residual_lse": (
        chain_kernels.verify_kernel,
        {**_VERIFY, "DECIDE": False, "HAS_LSE": True},
    ),
    "chain_decide": (chain_kernels.verify_kernel, {**_VERIFY, "DECIDE": True, "HAS_LSE": False}),
    "chain_decide_lse": (chain_kernels.verify_kernel, {**_VERIFY, "DECIDE": True, "HAS_LSE": True}),
    "chain_decide_one_hot": (
        chain_kernels.verify_kernel,
        {**_VERIFY, "DECIDE": True, "HAS_LSE": False, "HAS_DRAFT": False},
    ),
    "sample_stats": (sample_row.sample_stats_kernel, _ROW),
    "sample_draw": (sample_row.draw_kernel, {**_ROW, "CHUNKS": 16}),
    "tree_stats": (tree_kernels.node_stats_kernel, _TREE),
    "tree_traverse": (
        tree_kernels.traverse_kernel,
        {**_TREE, "REPLACEMENT": False, "ROWS": 128, "BLOCK": blocks.BLOCK, "CHUNKS": 16},
    ),
}
VARIANTS = {name: (*each, blocks.NUM_WARPS) for name, each in _VERIFICATION.items()} | _STEPS


class Usage(NamedTuple):
    """What a compiled kernel uses.

    Attributes:
        registers: per thread.
        stack, spilled, shared: bytes of stack, of spilled registers and of shared memory.
        narrow_loads: load instructions of a single 16-bit logit; streaming a row with them would
            take eight times the instructions.
        load_bits, store_bits: of the widest load from and store to global memory of a thread.
    """

    registers: int
    stack: int
    spilled: int
    shared: int
    narrow_loads: int
    load_bits: int
    store_bits: int


def build(name: str, capability: int) -> Usage:
    """Compile a variant of VARIANTS and let ptxas report on it.

    Args:
        name: key of VARIANTS.
        capability: CUDA compute capability, 80, 90, 100, ...

    Raises:
        RuntimeError: kernels are interpreted (TRITON_INTERPRET=1), or ptxas fails.
    """
    kernel, constants, num_warps = VARIANTS[name]
    if not hasattr(kernel, "arg_names") or triton.knobs.runtime.interpret:
        raise RuntimeError("Unset TRITON_INTERPRET: interpreted kernels cannot be compiled.")
    signature, attributes = {}, {}
    for position, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        is_pointer = argument.endswith("_ptr")
        signature[argument] = "*" + _POINTERS.get(argument, "fp32") if is_pointer else "i32"
        if is_pointer or argument in _MULTIPLES_OF_16:
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps},
    )
    ptx = compiled.asm["ptx"]
    return Usage(
        *_assemble(ptx, capability),
        compiled.metadata.shared,
        len(_NARROW_LOAD.findall(ptx)),
        _widest("ld", ptx),
        _widest("st", ptx),
    )


def _widest(instruction: str, ptx: str) -> int:
    """Bits of the widest access of this kind, 0 without one."""
    found = re.findall(_ACCESS.format(instruction), ptx)
    return max((int(count or 1) * int(bits) for count, bits in found), default=0)


def _assemble(ptx: str, capability: int) -> tuple[int, int, int]:
    """(registers, stack, spilled) as ptxas reports them."""
    target = _found(r"^\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        report = subprocess.run(
            [
                get_ptxas(capability).path,
                "-v",
                f"-arch={target}",
                source,
                "-o",
                Path(directory) / "out",
            ],
            capture_output=True,
            text=True,
        )
    if report.returncode:
        raise RuntimeError(f"ptxas failed: {report.stderr}")
    stack, stores, loads = (
        int(_found(rf"(\d+) bytes {what}", report.stderr))
        for what in ("stack frame", "spill stores", "spill loads")
    )
    return int(_found(r"Used (\d+) registers", report.stderr)), stack, stores + loads


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text, re.MULTILINE)
    if match is None:
        raise RuntimeError(f"No {pattern!r} in the compiler's output: {text[:200]}")
    return match.group(1)
