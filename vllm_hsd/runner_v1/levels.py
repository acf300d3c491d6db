"""Levels that are models: loaded by vLLM's loader, with their cache in vLLM's allocator."""

from __future__ import annotations

import numpy as np
import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.config.utils import replace
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import AttentionGroup

from vllm_hsd.core.drafts import ragged_arange


class ModelLevel:
    """One drafter model inside a V1 runner, sharing the target's block tables.

    Args:
        runner: the GPUModelRunner (or CPUModelRunner) that hosts the target.
        vllm_config: the target's configuration.
        index: place in the cascade, 0 the cheapest.
    """

    keeps_cache = True

    def __init__(self, runner, vllm_config: VllmConfig, index: int) -> None:
        self.runner = runner
        self.vllm_config = vllm_config
        self.index = index
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.device = runner.device
        self.attention_groups: list[AttentionGroup] = []

    def load(self, draft_vllm_config: VllmConfig, load_config) -> None:
        """Load the weights and note the attention layers that came with them.

        The tag and `additional_config` keep torch.compile from sharing one artefact between two
        levels of equal configuration; the prefix holds no integer as a dotted component, since
        vLLM reads layer numbers from those.
        """
        before = set(get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase))
        extra = draft_vllm_config.additional_config
        draft_vllm_config = replace(
            draft_vllm_config,
            additional_config={
                **(extra if isinstance(extra, dict) else {}),
                "hsd_level": self.index,
            },
        )
        tag = f"hsd_level{self.index}"
        with set_model_tag(tag):
            self.model = get_model(
                vllm_config=draft_vllm_config, prefix=tag, load_config=load_config
            )
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        self.layer_names = {
            name
            for name in set(layers) - before
            if layers[name].get_kv_cache_spec(self.vllm_config) is not None
        }

    def init_attention(self, kv_cache_config, kernel_block_sizes: list[int] | None) -> None:
        """Make the attention metadata builders, apart per KV-cache group.

        Sliding-window layers put one model's layers into several groups with block sizes of
        their own.
        """
        layers = get_layers_from_vllm_config(self.vllm_config, AttentionLayerBase)
        groups: dict[tuple, AttentionGroup] = {}
        for gid, group in enumerate(kv_cache_config.kv_cache_groups):
            for name in group.layer_names:
                if name not in self.layer_names:
                    continue
                backend, spec = layers[name].get_attn_backend(), group.kv_cache_spec
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                key = (gid, backend.full_cls_name(), spec, getattr(layers[name], "num_heads", 0))
                if key in groups:
                    groups[key].layer_names.append(name)
                    continue
                groups[key] = AttentionGroup(
                    backend=backend, layer_names=[name], kv_cache_spec=spec, kv_cache_group_id=gid
                )
        for group in groups.values():
            size = kernel_block_sizes[group.kv_cache_group_id] if kernel_block_sizes else None
            group.create_metadata_builders(self.vllm_config, self.device, kernel_block_size=size)
        self.attention_groups = list(groups.values())

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        """See `cascade.Level.forward`; at most `max_num_batched_tokens` tokens run at a time."""
        starts, counts = starts.copy(), counts.copy()
        while counts.sum() > self.max_tokens:
            # Long prompts first fill the cache by chunks that need no logits.
            spare = counts - np.maximum(num_logits, 1)
            before = np.cumsum(spare) - spare
            chunk = np.clip(self.max_tokens - before, 0, spare)
            some = chunk > 0
            if not some.any():
                return self._forward_in_halves(tokens, rows, starts, counts, num_logits)
            none = np.zeros(some.sum(), dtype=np.int64)
            self._forward_once(tokens, rows[some], starts[some], chunk[some], none)
            starts, counts = starts + chunk, counts - chunk
        return self._forward_once(tokens, rows, starts, counts, num_logits)

    def _forward_in_halves(self, tokens, rows, starts, counts, num_logits) -> torch.Tensor | None:
        if len(rows) == 1:
            return self._forward_once(tokens, rows, starts, counts, num_logits)
        middle = len(rows) // 2
        halves = [
            self.forward(tokens, rows[part], starts[part], counts[part], num_logits[part])
            for part in (slice(None, middle), slice(middle, None))
        ]
        halves = [half for half in halves if half is not None]
        return torch.cat(halves) if halves else None

    def _forward_once(self, tokens, rows, starts, counts, num_logits) -> torch.Tensor | None:
        owners, offsets = ragged_arange(counts)
        positions = starts[owners] + offsets
        total = len(positions)
        input_ids = torch.from_numpy(tokens[rows[owners], positions]).to(self.device)
        metadata, slots = self._attention_metadata(rows, owners, positions, starts, counts)
        positions = torch.from_numpy(positions).to(self.device)
        with set_forward_context(metadata, self.vllm_config, num_tokens=total, slot_mapping=slots):
            hidden = self.run(input_ids, positions)
        if not num_logits.any():
            return None
        ends = np.cumsum(counts)
        which, back = ragged_arange(num_logits)
        wanted = ends[which] - num_logits[which] + back
        if len(wanted) < total:
            hidden = hidden[torch.from_numpy(wanted).to(self.device)]
        return self.logits(hidden).to(torch.float32)

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, hidden] final hidden states of [n] tokens at [n] positions."""
        return self.model(input_ids=input_ids, positions=positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, V] logits of [n, hidden] states."""
        return self.model.compute_logits(hidden)

    def _attention_metadata(self, rows, owners, positions, starts, counts) -> tuple[dict, dict]:
        """Metadata and slot mapping per layer name, one build per attention group."""
        batch, total = len(rows), len(positions)
        query_start = np.zeros(batch + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        query_start = torch.from_numpy(query_start)
        seq_lens = torch.from_numpy((starts + counts).astype(np.int32))
        metadata, slots = {}, {}
        common = {}
        for group in self.attention_groups:
            gid = group.kv_cache_group_id
            if gid not in common:
                table = self.runner.input_batch.block_table[gid]
                blocks = table.block_table.np[rows]
                slot = blocks[owners, positions // table.block_size].astype(np.int64)
                slot = slot * table.block_size + positions % table.block_size
                common[gid] = CommonAttentionMetadata(
                    query_start_loc=query_start.to(self.device),
                    query_start_loc_cpu=query_start,
                    seq_lens=seq_lens.to(self.device),
                    seq_lens_cpu_upper_bound=seq_lens,
                    num_reqs=batch,
                    num_actual_tokens=total,
                    max_query_len=int(counts.max()),
                    max_seq_len=int(seq_lens.max()),
                    block_table_tensor=torch.from_numpy(blocks).to(self.device),
                    slot_mapping=torch.from_numpy(slot).to(self.device),
                    causal=True,
                    positions=torch.from_numpy(positions).to(self.device),
                    is_prefilling=torch.zeros(batch, dtype=torch.bool),
                )
            built = group.build_metadata_for_drafting(common[gid], draft_index=0)
            for name in group.layer_names:
                metadata[name], slots[name] = built, common[gid].slot_mapping
        return metadata, slots
