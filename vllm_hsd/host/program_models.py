"""Levels of a cascade that run forward passes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import get_layers_from_vllm_config, replace
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.attn_utils import (
    build_attn_metadata,
    build_slot_mappings_by_layer,
    init_attn_backend,
)

from vllm_hsd.cascade.exit_head import ExitHead
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.schedule import Draft, Schedule, Verify
from vllm_hsd.cascade.vocabulary import fit_logits, readable

# vLLM's annotation wants a concrete class and gets this abstract one everywhere; it does not
# declare the name that all its subclasses have.
_AttentionLayer: Any = AttentionLayerBase


class ProgramModel:
    """A drafter model with its KV cache in the target's block tables.

    Args:
        speculator: the cascade that it belongs to.
        index: position in the cascade, 0 the cheapest.
    """

    in_target_cache = False
    # Of a context shorter than the target's, past which nothing is drafted; None: it is not.
    max_model_len: int | None = None

    def __init__(self, speculator: Any, index: int) -> None:
        self.speculator, self.index = speculator, index
        self.vllm_config = self.draft_config = speculator.vllm_config
        self.enforce_eager = False
        self.vocab_size = speculator.vocab_size
        self.model: Any = None
        self.groups: list = []
        # (K, batch size, query length) -> attention metadata that a CUDA graph refers to
        self.captured: dict[tuple[int, int, int], dict[str, Any]] = {}

    def load(self, level_config: Any) -> None:
        """Load the weights and record the attention layers that came with them."""
        self.vocab_size = level_config.draft_model_config.get_vocab_size()
        longest = level_config.draft_model_config.max_model_len
        # vLLM gives a head the positions of its target.
        shorter = longest < self.vllm_config.model_config.max_model_len
        self.max_model_len = longest if shorter and level_config.method != "eagle3" else None
        before = set(get_layers_from_vllm_config(self.vllm_config, _AttentionLayer))
        extra = self.vllm_config.additional_config
        parallel = replace(
            level_config.draft_parallel_config, rank=self.vllm_config.parallel_config.rank
        )
        # As in vLLM 0.33: `replace` makes it anew, and what is compiled and dumped is kept by it.
        parallel.data_parallel_index = self.vllm_config.parallel_config.data_parallel_index
        # The tag and additional_config keep torch.compile from sharing one artifact between levels.
        self.draft_config = replace(
            level_config.apply_draft_overrides(self.vllm_config),
            model_config=level_config.draft_model_config,
            quant_config=None,
            parallel_config=parallel,
            additional_config={
                **(extra if isinstance(extra, dict) else {}),
                "hsd_level": self.index,
            },
        )
        tag = f"hsd_level{self.index}"
        with set_model_tag(tag):
            self.model = get_model(
                vllm_config=self.draft_config,
                prefix=tag,
                load_config=level_config.draft_load_config,
            )
        self.enforce_eager = bool(level_config.enforce_eager)
        layers = set(get_layers_from_vllm_config(self.vllm_config, _AttentionLayer))
        self.layer_names = layers - before

    @property
    def longest_query(self) -> int:
        """Most tokens that a request feeds to one of its passes."""
        return self.speculator.schedule.longest_query

    def init_attention(self, kv_cache_config: Any) -> None:
        """Make attention metadata builders of its own."""
        # The level's own configuration: builders size their buffers by its heads, and what they
        # capture by its bound, which is otherwise that of the target's batches.
        config = copy.copy(self.draft_config)
        # Block tables are the target's: a drafter's own context may be shorter.
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = self.vllm_config.model_config.max_model_len
        config.compilation_config = copy.copy(config.compilation_config)
        fed = self.speculator.state.batch * self.longest_query
        bound = config.compilation_config.max_cudagraph_capture_size or 0
        config.compilation_config.max_cudagraph_capture_size = max(bound, fed)
        self.groups, _, _ = init_attn_backend(
            kv_cache_config,
            config,
            self.speculator.device,
            active_layer_names=self.layer_names,
        )
        self.captured = {}

    def prepare_capture(self, state: ProposalState, schedule: Schedule) -> None:
        """Build the attention metadata of a proposal, outside the CUDA graph that refers to it.

        Its tensors are those of `state` and of the builders, whose memory does not move. The graph
        refreshes what the builders derive from them before every forward pass.
        """
        for q in schedule.query_lengths(self.index):
            key = state.longest, state.batch, q
            # Another program's graph may refer to it.
            if key not in self.captured:
                self.captured[key] = self._metadata(state, q, for_capture=True)

    def prepare_replay(self) -> None:
        """Map the block tables of the batch to the blocks of the attention kernels."""
        for groups in self.groups:
            for group in groups:
                group.map_to_kernel_block_table(
                    self.speculator.block_tables.input_block_tables[group.kv_cache_group_id]
                )

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, H]; called inside a forward context."""
        hidden = self.model(input_ids=input_ids, positions=positions)
        return hidden[0] if isinstance(hidden, tuple) else hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] to [n, V]."""
        return self.model.compute_logits(hidden)

    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        *more: torch.Tensor,
    ) -> Any:
        """Hidden states of a forward pass without a CUDA graph of its own; `more` is for `run`."""
        count = input_ids.shape[0]
        if self.vocab_size < self.speculator.vocab_size or self.speculator.has_placeholders:
            input_ids = readable(input_ids, self.vocab_size)
        if self.max_model_len is not None:
            # It is fed whole prompts, and has no rotary embedding of later places.
            positions = positions.clamp(max=self.max_model_len - 1)
        with set_forward_context(
            attn_metadata,
            self.vllm_config,
            num_tokens=count,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=count),
        ):
            return self.run(input_ids, positions, *more)

    def refresh(self, metadata: dict[str, Any]) -> None:
        """Let builders derive again what they keep of tensors that have changed."""
        for groups in self.groups:
            for group in groups:
                group.update_draft_decode_metadata(metadata)

    def forward(self, state: ProposalState, op: Draft | Verify, num_logits: int) -> torch.Tensor:
        q, batch = op.query_length, state.batch
        count = batch * q
        metadata = self.captured.get((state.longest, batch, q))
        if metadata is None:
            metadata = self._metadata(state, q)
        else:
            self.refresh(metadata)
        hidden = self.compute(
            state.input_ids[:count],
            state.positions[:count],
            metadata,
            build_slot_mappings_by_layer(
                state.slot_mapping[:, :count], self.speculator.kv_cache_config
            ),
        )
        last = hidden.view(batch, q, -1)[:, q - num_logits :].reshape(batch * num_logits, -1)
        rows = state.rows[op.level]
        assert rows is not None
        # The kernels want contiguous rows.
        logits = fit_logits(self.logits(last), self.speculator.vocab_size)
        return logits.to(rows.dtype).contiguous()

    def _metadata(
        self, state: ProposalState, q: int, *, for_capture: bool = False
    ) -> dict[str, Any]:
        """Attention metadata of a batch that feeds q tokens for each request."""
        batch, speculator = state.batch, self.speculator
        return build_attn_metadata(
            attn_groups=self.groups,
            num_reqs=batch,
            num_tokens=batch * q,
            query_start_loc_gpu=state.query_start_loc,
            query_start_loc_cpu=torch.arange(batch + 1, dtype=torch.int32) * q,
            max_query_len=q,
            seq_lens=state.seq_lens,
            max_seq_len=speculator.max_model_len,
            block_tables=[table[:batch] for table in speculator.block_tables.input_block_tables],
            slot_mappings=state.slot_mapping[:, : batch * q],
            kv_cache_config=speculator.kv_cache_config,
            seq_lens_cpu_upper_bound=speculator.seq_lens_bound[:batch],
            positions=state.positions[: batch * q],
            is_prefilling=torch.zeros(batch, dtype=torch.bool),
            for_cudagraph_capture=for_capture,
        )


class Uncompiled:
    """vLLM's own kernels for layers that run outside torch.compile.

    Where vLLM compiles, it leaves norms, rotary embeddings and activations to the compiler. Layer
    by layer they would be a kernel for every operation of torch.

    Args:
        parts: modules that run.
        vllm_config: of the compiled model.
        device: type of its device; its forward methods are named after it.
    """

    def __init__(self, parts: Iterable[torch.nn.Module], vllm_config: Any, device: str) -> None:
        modules = [module for part in parts for module in part.modules()]
        self.methods = [
            (module, getattr(module, f"forward_{device}"))
            for module in modules
            if isinstance(module, CustomOp)
        ]
        config = copy.copy(vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.mode = CompilationMode.NONE
        self.priority = current_platform.get_default_ir_op_priority(config)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Call these kernels in a block; the compiled model does not look at them again."""
        replaced = [module._forward_method for module, _ in self.methods]
        try:
            for module, method in self.methods:
                module._forward_method = method
            with self.priority.set_priority():
                yield
        finally:
            for (module, _), method in zip(self.methods, replaced, strict=True):
                module._forward_method = method


class ResidualStream(torch.nn.Module):
    """In the place of a final norm: the states that a head reads."""

    def forward(
        self, hidden: torch.Tensor, *residual: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[n, hidden] layer output and the residual stream, if the decoder keeps them apart.

        Before the first layer there is none (None).
        """
        if not residual:
            return hidden
        whole = hidden if residual[0] is None else hidden + residual[0]
        return whole, whole


class ProgramExit(ProgramModel):
    """The target's decoder, left after some of its layers.

    vLLM's decoders run `layers[start_layer:end_layer]` between the embedding and the final norm,
    for pipeline parallelism. A copy that ends earlier and shares all weights is an early exit with
    the model's own scaling, whatever its layers pass on to each other.

    It writes the target's KV cache: the lower layers' entries of target and exit are the same for
    the same tokens, so it has no cache of its own to fill.

    Args:
        speculator, index: as for `ProgramModel`.
        num_layers: layers that run, 0 (the embedding, with a head) to the target's depth.
        head: trained for them; None for the target's own norm and head.
    """

    in_target_cache = True

    def __init__(
        self, speculator: Any, index: int, num_layers: int, head: ExitHead | None = None
    ) -> None:
        super().__init__(speculator, index)
        self.num_layers = num_layers
        self.head = head and head.to(speculator.device, speculator.dtype)

    def attach(self, target: Any) -> None:
        """Share the layers of the loaded target."""
        self.target = target.unwrap() if hasattr(target, "unwrap") else target
        layers = self.target.model.layers[: self.num_layers]
        self.layer_names = attention_layer_names(layers)
        norm = None if self.head is None else ResidualStream()
        self.decoder = leave_after(self.target.model, self.num_layers, norm)
        parts = [*layers, self.decoder.norm]
        self.kernels = Uncompiled(parts, self.vllm_config, self.speculator.device.type)

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, hidden] states after the last of the layers."""
        with self.kernels.in_use():
            # Not __call__: that is the whole target where it is compiled.
            return self.decoder.forward(input_ids, positions, None)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] logits of [n, hidden] states."""
        if self.head is not None:
            return self.head.logits(hidden)
        return self.target.compute_logits(hidden)


def leave_after(decoder: Any, num_layers: int, norm: torch.nn.Module | None = None) -> Any:
    """A decoder that shares another one's weights and ends after `num_layers` layers.

    Args:
        decoder: `model` of one of vLLM's causal language models; not changed.
        norm: in the place of its final norm.
    """
    short = copy.copy(decoder)
    short._modules = dict(decoder._modules)
    short.end_layer = min(num_layers, decoder.end_layer)
    short.aux_hidden_state_layers = ()
    if norm is not None:
        short.norm = norm
    return short


def attention_layer_names(layers: Iterable[Any]) -> set[str]:
    """Names under which vLLM knows the attention of decoder layers."""
    modules = (module for layer in layers for module in layer.modules())
    return {module.layer_name for module in modules if isinstance(module, _AttentionLayer)}
