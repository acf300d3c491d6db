"""A cascade in the place of vLLM's draft model on the V2 runner.

A proposal is `core.program.Program` on a `ProposalState`, replayed as a CUDA graph where the batch
size has one. Prompts are ingested with the target's own attention metadata, which covers the
levels' layers because they share its block tables.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_hsd.core.program import Program
from vllm_hsd.core.proposal_state import COUNTS, KVGroups, ProposalState
from vllm_hsd.kernels.cascade_steps import stage
from vllm_hsd.runner_v2 import graph_checks
from vllm_hsd.runner_v2.graphs import ProposalGraphs, batch_sizes, why_eager
from vllm_hsd.runner_v2.levels import EarlyExitLevel
from vllm_hsd.runner_v2.metrics import DeviceCounts
from vllm_hsd.runner_v2.spec_config import max_batch_size, schedule_of, verifiers

logger = logging.getLogger(__name__)


class CascadeSpeculator(StandaloneARSpeculator):
    """Drafts with the levels of a `V2CascadeConfig`.

    The subclass passes the runner's isinstance checks; nothing of vLLM's drafting is used.

    Attributes:
        req_states: vLLM's table of requests, set once the runner has loaded its models.
        state: of the last proposal.
        graphs: captured proposals; None where all run without a CUDA graph.
    """

    num_extra_query_per_req = 0

    def __init__(self, vllm_config, device: torch.device) -> None:
        DraftModelSpeculator.__init__(self, vllm_config, device)
        # vLLM's is the drafter's, whose logits may be padded to another size.
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        self.hsd = vllm_config.speculative_config.hsd
        self.schedule = schedule_of(self.hsd)
        self.verifiers = verifiers(self.hsd)
        scales = [options.temperature_scale for options in self.hsd.options()]
        self.scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self.req_states: Any = None
        self.state: ProposalState  # once the levels are loaded
        self.hosted: list[Any] = []
        self.graphs: ProposalGraphs | None = None
        self.checks = graph_checks.enabled()

    def load_draft_model(self, target_model, target_attn_layer_names):
        for i, level in enumerate(self.hsd.levels):
            if level.on_v2 == "lookup":
                self.hosted.append(None)
                continue
            hosted = level.build_v2(self, i)
            if isinstance(hosted, EarlyExitLevel):
                hosted.attach(target_model)
            else:
                hosted.load(self.speculative_config.level_configs[i])
            self.hosted.append(hosted)
        # Here, since vLLM's memory profile comes before the KV cache, and its groups.
        dtype = cast(torch.dtype, self.dtype)
        self.state = ProposalState.allocate(
            self.schedule,
            batch=min(self.max_num_reqs, max_batch_size(self.hsd)),
            max_num_reqs=self.max_num_reqs,
            vocab_size=self.vocab_size,
            dtypes=[None if level is None else dtype for level in self.hosted],
            num_kv_groups=1,
            device=self.device,
        )
        self.counts = DeviceCounts(self.state.counts, self.schedule)
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
        self.state.set_kv_groups(block_tables.num_kv_cache_groups)
        levels = list(self.hosted)
        if levels[0] is None:
            levels[0] = self.hsd.levels[0].build_v2(self, 0)
        groups = KVGroups(
            block_tables.block_table_ptrs,
            block_tables.block_table_strides,
            block_tables.block_sizes_tensor,
        )
        self.program = Program(self.schedule, levels, self.verifiers, groups, self.max_model_len)

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        self.graphs = None
        levels = [level for level in self.hosted if level is not None]
        longest = self.schedule.longest_query
        reason = why_eager(cudagraph_mode, levels, longest)
        if reason is not None:
            logger.warning("The cascade drafts without CUDA graphs: %s.", reason)
            return
        limit = self.vllm_config.compilation_config.max_cudagraph_capture_size
        wanted = batch_sizes(self.state.batch)
        # Attention kernels size what they capture for this many tokens.
        sizes = [size for size in wanted if size * longest <= limit]
        if sizes != wanted:
            logger.warning(
                "The cascade drafts without CUDA graphs for more than %d requests: "
                "max_cudagraph_capture_size is %d, and a request feeds up to %d tokens.",
                max(sizes, default=0),
                limit,
                longest,
            )
        if sizes:
            self.graphs = ProposalGraphs(self.vllm_config, self.device, sizes)

    def capture(self) -> None:
        if self.graphs is not None:
            self.graphs.capture_all(self._prepare_capture, self.program.run)

    def _prepare_capture(self, batch: int) -> ProposalState:
        """State of a batch size with nothing but padding, and attention metadata for it."""
        state = self.state.bucket(batch)
        self.longest = torch.full((batch,), self.max_model_len, dtype=torch.int32)
        for level in self.hosted:
            if level is not None:
                level.prepare_capture(state)
        none = self.idx_mapping[:0].int()
        self._stage(state, none, none, self.temperature, self.seeds)
        return state

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
        # vLLM's scheduler asks for no drafts of a large batch; its warm-up may.
        drafts_none = num_speculative_tokens == 0 or count > self.state.batch
        if dummy_run or input_batch.has_prefill or drafts_none:
            self._ingest(input_batch, attn_metadata, slot_mappings, with_logits=dummy_run)
        if dummy_run:
            return drafts
        if drafts_none:
            accepted = (num_sampled - 1).clamp(min=0).sum()
            self.state.counts[-1, COUNTS.accepted] += accepted
            self.state.row_of_slot.fill_(-1)
            return drafts
        # What attention may read at most; the lengths themselves are on the device.
        self.longest = (
            input_batch.seq_lens_cpu_upper_bound[:count] + self.schedule.capacity
        ).clamp(max=self.max_model_len)
        size = None if self.graphs is None else self.graphs.size_for(count)
        state = self.state.bucket(size or count)
        self.counts.add_proposal()
        inputs = input_batch.idx_mapping, num_sampled, temperature, seeds
        self._stage(state, *inputs)
        if size is not None:
            for level in self.hosted:
                if level is not None:
                    level.prepare_replay()
        if self.checks:
            foreign = {"the batch": input_batch, "the table of requests": self.req_states}
            foreign |= {"num_sampled": num_sampled, "temperature": temperature, "seeds": seeds}
            self._run_checked(state, foreign, inputs)
        elif size is None or self.graphs is None:
            self.program.run(state)
        else:
            self.graphs.replay(size)
        return drafts.copy_(state.draft_tokens[:count])

    def _run_checked(self, state: ProposalState, foreign: dict[str, Any], inputs: tuple) -> None:
        """Draft without a graph, on nothing that the runner hands over; then with the graph.

        Raises:
            GraphError: one of the two drafts something else, or cannot be captured.
        """
        before, real = state.counts.clone(), len(inputs[0])
        # Lookups search the text in place: its memory does not move.
        with graph_checks.no_foreign_reads(foreign, but=self.req_states.all_token_ids.gpu):
            self.program.run(state)
        if self.graphs is None or self.graphs.size_for(state.batch) != state.batch:
            return
        drafted = state.draft_tokens[:real].clone()
        self._stage(state, *inputs)
        state.counts.copy_(before)
        self.graphs.replay(state.batch)
        replayed = state.draft_tokens[:real]
        if not drafted.equal(replayed):
            raise graph_checks.GraphError(
                f"the CUDA graph for {state.batch} requests drafts {replayed.tolist()}, the same "
                f"proposal without a graph {drafted.tolist()}."
            )

    def _stage(self, state, index, num_sampled, temperature, seeds) -> None:
        """Begin a proposal; nothing after it reads what the runner hands over."""
        stage(
            state,
            self.schedule,
            index=index.int(),
            text=self.req_states.all_token_ids.gpu,
            length=self.req_states.total_len.gpu,
            num_sampled=num_sampled,
            temperature=temperature,
            seeds=seeds,
            scales=self.scales,
            max_model_len=self.max_model_len,
        )

    def _ingest(self, input_batch, attn_metadata, slot_mappings, with_logits: bool) -> None:
        """Let every model compute what the target has computed in this step.

        Entries of rejected tokens are after the text and are overwritten before they are read.
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
                rows = self.state.batch * self.schedule.longest_logits
                level.logits(hidden[:rows])
