"""A stand-in for CUDA graphs on a CPU: what a graph keeps and what it does not run again.

While it captures, every operation of torch and every launch of a kernel is recorded
with the tensors that it was called with. A replay repeats them on the same tensors: Python code
between them does not run again, and a tensor that the code would look up anew stays the old one.
"""

import contextlib
import functools
from functools import partial
from typing import ClassVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

aten = torch.ops.aten
HOST_READS = (aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default)


class RecordedGraph:
    """In the place of `torch.cuda.CUDAGraph`."""

    made: ClassVar[list["RecordedGraph"]] = []

    def __init__(self) -> None:
        self.calls: list = []
        self.replays = 0
        RecordedGraph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        for call in self.calls:
            call()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in HOST_READS:
            raise RuntimeError("a value is read on the host while a CUDA graph is captured")
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        self.graph.calls.append(partial(_again, func, args, kwargs, given))
        return given


def _again(func, args, kwargs, given) -> None:
    known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
    for old, new in zip(_tensors(given), _tensors(func(*args, **kwargs)), strict=True):
        # A view, or an argument that was changed in place, is where it was.
        if old.untyped_storage().data_ptr() in known:
            continue
        if "scheduler_metadata" in str(func):
            # A plan of the CPU's attention has pointers into itself: a copy's would dangle.
            old.set_(new)
        else:
            old.copy_(new)


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def capture(graph: RecordedGraph, *_args, **_kwargs):
    """In the place of `torch.cuda.graph`."""
    launch = JITFunction.run

    def run(self, *args, **kwargs):
        again = partial(_launch, launch, self, args, kwargs)
        graph.calls.append(again)
        again()

    with mock.patch.object(JITFunction, "run", run), _Recorder(graph):
        yield


def _launch(launch, kernel, args, kwargs) -> None:
    # Triton itself computes with torch.
    with _disable_current_modes():
        launch(kernel, *args, **kwargs)


def install(replace=setattr) -> None:
    """Let vLLM's `CudaGraphManager` capture them; `replace` may be `monkeypatch.setattr`."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import cudagraph_utils

    RecordedGraph.made = []
    replace(torch.cuda, "CUDAGraph", RecordedGraph)
    replace(torch.cuda, "graph", capture)
    replace(type(current_platform), "get_global_graph_pool", lambda self: None)
    for name in ("graph_capture", "capture_pool"):
        replace(cudagraph_utils, name, lambda *a, **k: contextlib.nullcontext())
    replace(cudagraph_utils, "current_stream", lambda: None)


def plan_again(builder, metadata) -> None:
    """A new plan of the CPU's attention, by its metadata builder."""
    from vllm import _custom_ops as ops

    metadata.scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(metadata.seq_lens),
        num_heads=builder.num_heads,
        num_kv_heads=builder.num_kv_heads,
        head_dim=builder.head_dim,
        seq_lens=metadata.seq_lens,
        dtype=builder.dtype,
        query_start_loc=metadata.query_start_loc,
        causal=True,
        sliding_window_size=builder.window_size,
        isa=builder.isa,
        enable_kv_split=False,
        dynamic_causal=None,
        kv_cache_dtype=builder.kv_cache_dtype,
    )


def serve() -> None:
    """A patch for engines: their cascades draft by recorded graphs alone.

    The CPU's attention makes a new plan in them where a GPU's refreshes its own.
    """
    from vllm.config.compilation import CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    install()
    # Attention as one opaque operation would look its arguments up at every replay.
    CpuPlatform.opaque_attention_op = classmethod(lambda cls: False)

    CPUAttentionMetadataBuilder.supports_draft_decode_metadata_update = True
    CPUAttentionMetadataBuilder.update_draft_decode_metadata = plan_again
    CPUAttentionMetadataBuilder.get_cudagraph_support = classmethod(
        lambda cls, *args: AttentionCGSupport.ALWAYS
    )
    initialize = GPUModelRunner.initialize_kv_cache

    @functools.wraps(initialize)
    def initialize_kv_cache(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        speculator = self.speculator
        self.compilation_config.max_cudagraph_capture_size = 512
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        speculator.capture()
        assert len(RecordedGraph.made) == len(speculator.graphs.descriptors)
        for program in speculator.programs.values():
            program.run = _without_a_graph

    GPUModelRunner.initialize_kv_cache = initialize_kv_cache


def _without_a_graph(state) -> None:
    raise AssertionError("a proposal ran without its CUDA graph")
