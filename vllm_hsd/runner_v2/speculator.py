"""A cascade in the place of vLLM's draft model on the V2 runner, eagerly.

A proposal is `core.program.Program` on a `ProposalState`. Prompts are ingested with the target's
own attention metadata, which covers the levels' layers because they share its block tables.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_hsd.core.exit_head import read_exit_head
from vllm_hsd.core.program import NgramProgramLookup, Program
from vllm_hsd.core.proposal_state import KVGroups, ProposalState
from vllm_hsd.kernels.cascade_steps import stage
from vllm_hsd.runner_v2.levels import EarlyExitLevel, ExitHeadLevel, ModelLevel
from vllm_hsd.runner_v2.spec_config import schedule_of, verifiers


class CascadeSpeculator(StandaloneARSpeculator):
    """Drafts with the levels of a `CascadeSpeculativeConfig`.

    The subclass passes the runner's isinstance checks; nothing of vLLM's drafting is used.

    Attributes:
        req_states: vLLM's table of requests, set once the runner has loaded its models.
        state: of the last proposal, set with the KV cache.
    """

    num_extra_query_per_req = 0

    def __init__(self, vllm_config, device: torch.device) -> None:
        DraftModelSpeculator.__init__(self, vllm_config, device)
        self.hsd = vllm_config.speculative_config.hsd
        self.schedule = schedule_of(self.hsd)
        self.verifiers = verifiers(self.hsd)
        scales = [level.temperature_scale for level in self.hsd.levels]
        self.scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self.req_states: Any = None
        self.state: ProposalState | None = None
        self.hosted: list[Any] = []

    def load_draft_model(self, target_model, target_attn_layer_names):
        for i, level in enumerate(self.hsd.levels):
            if level.kind == "ngram":
                self.hosted.append(None)
                continue
            if level.kind == "early_exit":
                hosted: ModelLevel = EarlyExitLevel(self, i, level.early_exit)
            elif level.kind == "exit_head":
                hosted = ExitHeadLevel(self, i, read_exit_head(level.exit_head))
            else:
                hosted = ModelLevel(self, i)
            if isinstance(hosted, EarlyExitLevel):
                hosted.attach(target_model)
            else:
                hosted.load(self.speculative_config.level_configs[i])
            self.hosted.append(hosted)
        models = [level.model for level in self.hosted if level is not None and level.model]
        return models[-1] if models else target_model

    def set_attn(
        self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
    ) -> None:
        DraftModelSpeculator.set_attn(
            self,
            model_state,
            kv_cache_config,
            block_tables,
            target_input_buffers,
            target_attn_groups,
        )
        for level in self.hosted:
            if level is not None:
                level.init_attention(kv_cache_config)
                # vLLM maps the caches of all groups listed here to kernel blocks.
                self.attn_groups.extend(level.groups)
        dtype = cast(torch.dtype, self.dtype)
        self.state = ProposalState.allocate(
            self.schedule,
            batch=self.max_num_reqs,
            max_num_reqs=self.max_num_reqs,
            vocab_size=self.vocab_size,
            dtypes=[None if level is None else dtype for level in self.hosted],
            num_kv_groups=block_tables.num_kv_cache_groups,
            device=self.device,
        )
        levels = list(self.hosted)
        if levels[0] is None:
            ngram = self.hsd.levels[0].ngram
            text = self.req_states.all_token_ids.gpu
            levels[0] = NgramProgramLookup(text, ngram.min, ngram.max)
        groups = KVGroups(
            block_tables.block_table_ptrs,
            block_tables.block_table_strides,
            block_tables.block_sizes_tensor,
        )
        self.program = Program(self.schedule, levels, self.verifiers, groups, self.max_model_len)

    @torch.inference_mode()
    def propose(
        self,
        input_batch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled,
        num_rejected,
        last_sampled,
        next_prefill_tokens,
        temperature,
        seeds,
        dp_sync_state=None,
        dummy_run=False,
        skip_attn_for_dummy_run=False,
        mm_inputs=None,
        is_profile=False,
        num_speculative_tokens=None,
    ) -> torch.Tensor:
        count = input_batch.num_reqs
        drafts = self.draft_tokens[:count]
        if dummy_run or input_batch.has_prefill or num_speculative_tokens == 0:
            self._ingest(input_batch, attn_metadata, slot_mappings, with_logits=dummy_run)
        if dummy_run:
            return drafts
        assert self.state is not None
        if num_speculative_tokens == 0:
            self.state.row_of_slot.fill_(-1)
            return drafts
        # What attention may read at most; the lengths themselves are on the device.
        self.longest = (
            input_batch.seq_lens_cpu_upper_bound[:count] + self.schedule.capacity
        ).clamp(max=self.max_model_len)
        state = self.state.bucket(count)
        stage(
            state,
            self.schedule,
            index=input_batch.idx_mapping.int(),
            text=self.req_states.all_token_ids.gpu,
            length=self.req_states.total_len.gpu,
            num_sampled=num_sampled,
            temperature=temperature,
            seeds=seeds,
            scales=self.scales,
            max_model_len=self.max_model_len,
        )
        self.program.run(state)
        return drafts.copy_(state.draft_tokens)

    def _ingest(self, input_batch, attn_metadata, slot_mappings, with_logits: bool) -> None:
        """Let every model compute what the target has computed in this step.

        Entries of rejected tokens lie after the text and are overwritten before they are read.
        """
        tokens = input_batch.num_tokens_after_padding
        for level in self.hosted:
            if level is None or level.in_target_cache:
                continue
            hidden = level.compute(
                input_batch.input_ids[:tokens],
                input_batch.positions[:tokens],
                attn_metadata,
                slot_mappings,
            )
            if with_logits:
                level.logits(hidden[: self.max_num_reqs])
