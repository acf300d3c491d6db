"""The levels of a cascade inside a V1 runner."""

from __future__ import annotations

from typing import Any, cast

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
from vllm_hsd.core.exit_head import ExitHead
from vllm_hsd.core.levels import LookupLevel, LookupResult, Texts, ngram_confidence
from vllm_hsd.core.vocabulary import fit_logits, readable
from vllm_hsd.exits import TargetExit

# vLLM's function takes abstract classes too, which its annotation does not say.
_AttentionLayer: Any = AttentionLayerBase


class ModelLevel:
    """A drafter model, loaded by vLLM's loader, with its KV cache in the target's block tables.

    Args:
        runner: the GPUModelRunner (or CPUModelRunner) that hosts the target.
        vllm_config: the target's configuration.
        index: position in the cascade, 0 the cheapest.
        context_length: longest text in tokens that the model can read.

    Attributes:
        vocab_size: tokens that the loaded model has rows for; the target's unless padded otherwise.
    """

    keeps_cache = True

    def __init__(self, runner, vllm_config: VllmConfig, index: int, context_length: int) -> None:
        self.runner = runner
        self.vllm_config = vllm_config
        self.index = index
        self.context_length = context_length
        self.target_vocab_size = self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.device = runner.device
        self.attention_groups: list[AttentionGroup] = []
        self.model: Any = None

    def load(self, draft_vllm_config: VllmConfig, model_config, load_config) -> None:
        """Load the weights and record the attention layers that came with them.

        The tag and `additional_config` keep torch.compile from sharing one artifact between two
        levels of equal configuration; the prefix holds no integer as a dotted component, since
        vLLM reads layer numbers from those.
        """
        self.vocab_size = model_config.get_vocab_size()
        before = set(get_layers_from_vllm_config(self.vllm_config, _AttentionLayer))
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
                vllm_config=draft_vllm_config,
                model_config=model_config,
                prefix=tag,
                load_config=load_config,
            )
        layers = get_layers_from_vllm_config(self.vllm_config, _AttentionLayer)
        self.layer_names = {
            name
            for name in set(layers) - before
            if layers[name].get_kv_cache_spec(self.vllm_config) is not None
        }

    def attach(self, target_model: Any, named: str) -> None:
        """Share what the level needs of the loaded target: nothing.

        Args:
            target_model: the target.
            named: what messages call the level, "levels[i].model 'path'".
        """

    def init_attention(self, kv_cache_config, kernel_block_sizes: list[int] | None) -> None:
        """Make the attention metadata builders, one set per KV-cache group.

        Sliding-window layers put one model's layers into several groups with different block sizes.
        """
        layers = get_layers_from_vllm_config(self.vllm_config, _AttentionLayer)
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
        """See `core.levels.Level.forward`; at most `max_num_batched_tokens` tokens at a time."""
        ends = np.cumsum(counts)
        if len(ends) and ends[-1] <= self.max_tokens:
            return self._forward_once(tokens, rows, starts, counts, num_logits)
        parts = []
        begins, wanted = ends - counts, ends - num_logits
        for low in range(0, int(ends[-1]) if len(ends) else 0, self.max_tokens):
            # This part's stretch of every request in the flat sequence of all tokens.
            first = np.clip(begins, low, low + self.max_tokens)
            last = np.clip(ends, low, low + self.max_tokens)
            some = last > first
            parts.append(
                self._forward_once(
                    tokens,
                    rows[some],
                    (starts + first - begins)[some],
                    (last - first)[some],
                    np.maximum(last - np.maximum(first, wanted), 0)[some],
                )
            )
        logits = [part for part in parts if part is not None]
        return torch.cat(logits) if logits else None

    def _forward_once(self, tokens, rows, starts, counts, num_logits) -> torch.Tensor | None:
        owners, offsets = ragged_arange(counts)
        positions = starts[owners] + offsets
        total = len(positions)
        input_ids = torch.from_numpy(tokens[rows[owners], positions]).to(self.device)
        if self.vocab_size < self.target_vocab_size:
            input_ids = readable(input_ids, self.vocab_size)
        metadata, slots = self._attention_metadata(rows, owners, positions, starts, counts)
        positions = torch.from_numpy(positions).to(self.device)
        with set_forward_context(metadata, self.vllm_config, num_tokens=total, slot_mapping=slots):
            hidden = self.run(input_ids, positions)
        if not num_logits.any():
            return None
        ends = np.cumsum(counts)
        request, offset = ragged_arange(num_logits)
        wanted = ends[request] - num_logits[request] + offset
        if len(wanted) < total:
            hidden = hidden[torch.from_numpy(wanted).to(self.device)]
        return fit_logits(self.logits(hidden).to(torch.float32), self.target_vocab_size)

    def warm_up(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Run [n] tokens at [n] positions, for memory profiling and compilation."""
        self.run(input_ids, positions)

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, hidden] final hidden states of [n] tokens at [n] positions."""
        return self.model(input_ids=input_ids, positions=positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, vocab_size] logits of [n, hidden] states."""
        return self.model.compute_logits(hidden)

    def slots(self, gid: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[n] int64 slots of positions of the batch's rows in the KV cache of a group."""
        table = self.runner.input_batch.block_table[gid]
        blocks = table.block_table.np[rows, positions // table.block_size].astype(np.int64)
        return blocks * table.block_size + positions % table.block_size

    def _attention_metadata(self, rows, owners, positions, starts, counts) -> tuple[dict, dict]:
        """Metadata and slot mapping per layer name, one build per attention group."""
        batch, total = len(rows), len(positions)
        query_start = torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32))
        seq_lens = torch.from_numpy((starts + counts).astype(np.int32))
        metadata: dict = {}
        slots: dict = {}
        common: dict[int, CommonAttentionMetadata] = {}
        for group in self.attention_groups:
            gid = group.kv_cache_group_id
            if gid not in common:
                blocks = self.runner.input_batch.block_table[gid].block_table.np[rows]
                slot = self.slots(gid, rows[owners], positions)
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


class EarlyExitLevel(TargetExit, ModelLevel):
    """The target's first layers.

    Args:
        runner, vllm_config, index: as for `ModelLevel`.
        num_layers, head: see `TargetExit`.
    """

    keeps_cache = False

    def __init__(
        self,
        runner,
        vllm_config: VllmConfig,
        index: int,
        num_layers: int,
        head: ExitHead | None = None,
    ) -> None:
        super().__init__(runner, vllm_config, index, vllm_config.model_config.max_model_len)
        dtype = cast(torch.dtype, vllm_config.model_config.dtype)
        self.num_layers, self.head = num_layers, head and head.to(self.device, dtype)


class NgramLevel(LookupLevel):
    """Prompt lookup with vLLM's own matcher.

    Args:
        shortest, longest: n-grams at the end of the text that are looked up, in tokens.
        max_model_len: longest text in tokens.
    """

    def __init__(self, shortest: int, longest: int, max_model_len: int) -> None:
        # Only now: once numba is loaded, vLLM 0.32 fails to import further Triton kernels.
        from vllm.v1.spec_decode import ngram_proposer

        self.shortest, self.longest, self.max_model_len = shortest, longest, max_model_len
        self.match = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
        # Compiles it: for seconds, of which no request is to wait.
        first, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        self.lookup(Texts(np.zeros((1, 1), np.int32), first, first, one), one)

    def lookup(self, texts: Texts, requested: np.ndarray) -> LookupResult:
        """See `core.levels.LookupLevel.lookup`."""
        result = LookupResult.empty(len(requested), int(requested.max(initial=0)))
        for i in np.flatnonzero(requested):
            found = self.match(
                origin_tokens=texts.tokens[texts.rows[i], : texts.ends[i]],
                min_ngram=self.shortest,
                max_ngram=self.longest,
                max_model_len=self.max_model_len,
                k=int(requested[i]),
            )
            result.put(i, found, ngram_confidence(len(found)))
        return result
