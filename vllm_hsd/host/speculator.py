"""A cascade in the place of vLLM's draft model on the V2 runner.

A proposal is `cascade.program.Program` on a `ProposalState`, replayed as a CUDA graph where the
batch size has one. Prompts are ingested with the target's own attention metadata, which covers the
levels' layers because they share its block tables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_hsd.budget.further_passes import FurtherPasses
from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.adaptive_verification import DraftConfidence
from vllm_hsd.cascade.cascade_steps import stage
from vllm_hsd.cascade.entropy_stopping import DeviceThresholds, observe_target
from vllm_hsd.cascade.program import Program, ProgramSources
from vllm_hsd.cascade.proposal_state import COUNTS, KVGroups, ProposalState, row_dtypes
from vllm_hsd.cascade.several_drafts import SeveralDrafts, SeveralDraftsProgram
from vllm_hsd.config.level_checks import check_states
from vllm_hsd.config.sizes import (
    ladder_of,
    longest_query,
    max_batch_size,
    most_with_branches,
    reads_target_states,
    schedule_of,
    shortest_of,
    verifiers,
)
from vllm_hsd.errors import quoted
from vllm_hsd.host import graph_checks
from vllm_hsd.host.branches import HostedBranches
from vllm_hsd.host.device_counts import DeviceCounts
from vllm_hsd.host.draft_confidence import draft_confidence
from vllm_hsd.host.draft_models import loading
from vllm_hsd.host.graphs import Proposal, ProposalGraphs, batch_sizes, why_eager
from vllm_hsd.host.request_parameters import RequestParameters

logger = logging.getLogger(__name__)


class CascadeSpeculator(StandaloneARSpeculator):
    """Drafts with the levels of a `CascadeSpeculativeConfig`.

    The subclass passes the runner's isinstance checks; nothing of vLLM's drafting is used.

    Attributes:
        req_states: vLLM's table of requests, set once the runner has loaded its models.
        parameters: of the requests, set with it.
        state, program: of the longest drafts.
        thresholds: where a level's drafts end by entropy; None if none's do.
        shorter: states of shorter drafts by length, in the same memory.
        programs: of all drafts.
        further: whether the model next to lookups runs passes after its first ones.
        several: drafts of a model next to its chains; None where it draws one of each request.
        lookup: what drafts at the lowest level from the requests' texts; None for a model alone.
        counted: levels whose rows follow from counts in texts, by their place in the cascade.
        stale: bool [max_num_reqs] on the host, slots whose texts the levels have not read whole.
            Their requests draft nothing any more: what a level reads is never left out.
        branches: of the requests, set with `req_states`; None where the target verifies chains.
        graphs: captured proposals; None where all run without a CUDA graph.
        confidence: of the drafts, for vLLM's adaptive verification; None without it.
        head: the lowest level if that reads the target's hidden states.
    """

    head: Any = None
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
        self.parameters: RequestParameters
        self.hosted: list[Any] = []
        self.stale = np.zeros(self.max_num_reqs, dtype=bool)
        self.graphs: ProposalGraphs | None = None
        self.branches: HostedBranches | None = None
        self.checks = graph_checks.enabled()
        dtype = cast(torch.dtype, self.dtype)
        # Before vLLM's memory profile, and not with the weights, which sleep mode may discard.
        self.state = ProposalState.allocate(
            self.schedule,
            batch=min(
                self.max_num_reqs,
                max_batch_size(
                    self.hsd, longest_query(self.hsd, self.schedule), self.max_num_tokens
                ),
            ),
            max_num_reqs=self.max_num_reqs,
            vocab_size=self.vocab_size,
            dtypes=row_dtypes(
                [level.last_drafts_by for level in self.hsd.levels],
                self.verifiers,
                self.hsd.horizontal_tokens,
                dtype,
            ),
            num_kv_groups=1,
            device=device,
        )
        self.confidence = self._confidence()
        # vLLM tells it what became of the drafts, and makes none of its own.
        self.use_acceptance_estimator = False
        self.acceptance_estimator = cast(Any, self.confidence)
        self.thresholds = self._thresholds()
        self.shorter = self._shorter_states()
        self.several = self._several_drafts()
        lowest = self.hsd.levels[0]
        self.counts = DeviceCounts(self.state.counts, getattr(lowest, "names", ()))
        self.lookup = lowest.build(self, 0) if lowest.drafts_by == "lookup" else None
        self.counted = {
            k: level.drafters[-1].build(self, k)
            for k, level in enumerate(self.hsd.levels)
            if level.last_drafts_by == "counts"
        }
        if reads_target_states(self.hsd):
            self.head = lowest.drafters[-1].build(self, 0)

    def _confidence(self) -> DraftConfidence | None:
        if not self.hsd.enable_adaptive_verification:
            return None
        longest = self.schedule.num_speculative_tokens
        return draft_confidence(self.max_num_reqs, longest, self.device, self.state.lengths_of)

    def _thresholds(self) -> DeviceThresholds | None:
        stopping = [options.stopping == "entropy" for options in self.hsd.options()]
        return DeviceThresholds(stopping, self.state) if any(stopping) else None

    def _shorter_states(self) -> dict[int, ProposalState]:
        lengths = {*ladder_of(self.hsd)[1:]}
        if self.hsd.adaptive and any(level.last_drafts_by == "model" for level in self.hsd.levels):
            # By which models read steps without drafts, see `_keep_up`.
            lengths.add(shortest_of(self.hsd))
        lengths -= {self.state.longest}
        return {n: self.state.shortened(schedule_of(self.hsd, n)) for n in lengths}

    def _several_drafts(self) -> SeveralDrafts | None:
        if self.schedule.drafts == 1:
            return None
        sizes, most = batch_sizes(self.state.batch), most_with_branches(self.hsd)
        return SeveralDrafts.allocate(self.state, self.schedule.drafts, sizes, most)

    def _build_programs(self, levels: list[Any], groups: KVGroups) -> None:
        for state in self.shorter.values():
            state.slot_mapping = self.state.slot_mapping
        sources, text = None, self.req_states.all_token_ids.gpu
        if levels[0] is None:
            levels[0] = partial(cast(Any, self.lookup), text=text)
        elif isinstance(self.lookup, SourcesLookup):
            offer = partial(self.lookup.offer, text=text)
            sources = ProgramSources(offer, self.lookup.choose, self.lookup.drawn)
            self.further = FurtherPasses(self.lookup.wanted)
        kind: Callable[..., Program] = Program
        if self.several is not None:
            kind = partial(SeveralDraftsProgram, kept=self.several)
        build = partial(
            kind,
            levels=levels,
            verifiers=self.verifiers,
            groups=groups,
            max_model_len=self.max_model_len,
            thresholds=self.thresholds,
            sources=sources,
            confidence=self.confidence,
        )
        self.program = build(self.schedule)
        self.programs = {Proposal(self.state.longest): self.program}
        self.programs |= {Proposal(n): build(schedule_of(self.hsd, n)) for n in self.shorter}
        for proposal, program in list(self.programs.items()):
            fewer = program.schedule.with_first_passes()
            if sources is not None and fewer != program.schedule:
                self.programs[proposal._replace(every_pass=False)] = build(fewer)
        if self.several is not None:
            chain = Proposal(self.state.longest, every_pass=False)
            self.programs[chain] = build(self.schedule.with_one_draft())

    def _keep_up(self, input_batch: Any, num_sampled: torch.Tensor) -> bool:
        """In a CUDA graph, let the levels read a step without drafts: one pass of each.

        It is the shortest proposal, whose drafts are dropped.

        Returns:
            False where the batch has no such graph.
        """
        proposal = Proposal(shortest_of(self.hsd))
        fewer = proposal._replace(every_pass=False)
        proposal = fewer if fewer in self.programs else proposal
        count = input_batch.num_reqs
        size = None if self.graphs is None else self.graphs.size_for(count, proposal)
        if size is None:
            return False
        self._set_longest(input_batch)
        counts = self.state.counts.clone()
        state = self.shorter.get(proposal.length, self.state).bucket(size)
        inputs = input_batch.idx_mapping, num_sampled
        self._stage(state, self.programs[proposal].schedule, *inputs)
        for level in self.hosted:
            if level is not None:
                level.prepare_replay()
        assert self.graphs is not None
        self.graphs.replay(size, proposal)
        self.state.counts.copy_(counts)
        return True

    def _next_proposal(self, length: int | None) -> Proposal:
        """For so many tokens; the longest for lengths that only vLLM's warm-up requests."""
        if self.several is not None:
            return Proposal(self.state.longest, every_pass=length != self.state.longest)
        # vLLM's list has all rows of a request.
        row = self.state.longest if length is None else (length + 1) // self.hsd.branches - 1
        proposal = Proposal(row if row in self.shorter else self.state.longest)
        fewer = proposal._replace(every_pass=False)
        return proposal if fewer not in self.programs or self.further.due() else fewer

    @property
    def drawn(self) -> torch.Tensor | None:
        """float32 [max_num_reqs], 0 where the target verifies a lookup's draft, 1 where a model's.

        None where all drafts are of one kind.
        """
        lookup, alone = self.lookup, self.schedule.num_levels == 1
        if alone and isinstance(lookup, SourcesLookup) and lookup.has_drafter:
            return lookup.drawn[:-1]
        return None

    @property
    def keeps_caches(self) -> bool:
        """Whether a level misses what it does not compute; lookups and exits do not."""
        return any(level is not None and not level.in_target_cache for level in self.hosted)

    @property
    def max_model_len(self) -> int:
        """Of the target; vLLM may lower it to what the cache holds, after the drafter is made."""
        levels = cast(Any, self.speculative_config).level_configs
        contexts = [level.draft_model_config.max_model_len for level in levels if level is not None]
        return min([self.vllm_config.model_config.max_model_len, *contexts])

    @max_model_len.setter
    def max_model_len(self, value: int) -> None:
        """vLLM 0.32 sets it once."""

    def load_model(self, target_model) -> None:
        super().load_model(target_model)
        # vLLM gathers encoder outputs in every step for a drafter that takes them; no level does.
        self.supports_mm_inputs = False

    def load_draft_model(self, target_model, target_attn_layer_names):
        for i, level in enumerate(self.hsd.levels):
            if level.last_drafts_by != "model":
                self.hosted.append(None)
                continue
            # Only the last source can be a model.
            reads_states = level.drafters[-1].reads_target_states
            hosted = self.head if reads_states else level.drafters[-1].build(self, i)
            if not hosted.in_target_cache:
                config = cast(Any, self.speculative_config).level_configs[i]
                name, source = level.named_sources(f"levels[{i}]")[-1]
                with loading(f"{name}.{source.kind} {quoted(config.model)}"):
                    hosted.load(config)
            if hosted.in_target_cache or reads_states:
                hosted.attach(target_model)
            self.hosted.append(hosted)
        models = [level.model for level in self.hosted if level is not None and level.model]
        return models[-1] if models else target_model

    def set_attn(
        self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
    ) -> None:
        check_states(kv_cache_config)
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
        if self.branches is not None:
            self.branches.set_attn(kv_cache_config)
        self.state.set_kv_groups(block_tables.num_kv_cache_groups)
        levels, text = list(self.hosted), self.req_states.all_token_ids.gpu
        for k, level in self.counted.items():
            level.text, levels[k] = text, level
        groups = KVGroups(
            block_tables.block_table_ptrs,
            block_tables.block_table_strides,
            block_tables.block_sizes_tensor,
        )
        if self.head is not None:
            self.head.kv_groups = groups
        self._build_programs(levels, groups)

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        if self.branches is not None:
            self.branches.limit_graphs()
        self.graphs = None
        levels = [level for level in self.hosted if level is not None]
        longest = longest_query(self.hsd, self.schedule)
        reason = why_eager(cudagraph_mode, levels, longest)
        if reason is not None:
            logger.warning("The cascade drafts without CUDA graphs: %s.", reason)
            return
        sizes = batch_sizes(self.state.batch)
        limits = {}
        if self.several is not None:
            limits[Proposal(self.state.longest)] = self.several.batch
        proposals = list(self.programs)
        self.graphs = ProposalGraphs(self.vllm_config, self.device, sizes, proposals, limits)

    def capture(self) -> None:
        if self.graphs is not None:
            self.graphs.capture_all(self._prepare_capture)

    def _prepare_capture(self, batch: int, proposal: Proposal) -> Callable[[], None]:
        """A proposal for nothing but padding, and attention metadata for it."""
        program = self.programs[proposal]
        state = self.shorter.get(proposal.length, self.state).bucket(batch)
        self.longest = torch.full((batch,), self.max_model_len, dtype=torch.int32)
        for level in self.hosted:
            if level is not None:
                level.prepare_capture(state, program.schedule)
        none = self.idx_mapping[:0].int()
        self._stage(state, program.schedule, none, none)
        return partial(program.run, state)

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
        *_,
        dummy_run=False,
        num_speculative_tokens=None,
        **__,
    ) -> torch.Tensor:
        count = input_batch.num_reqs
        drafts = self.draft_tokens[:count]
        computed = input_batch, attn_metadata, slot_mappings
        if self.head is not None:
            self.head.take_states(input_batch, last_hidden_states, aux_hidden_states)
        if dummy_run:
            self._ingest(*computed, with_logits=True)
            return drafts
        if self.thresholds is not None:
            observe_target(
                self.thresholds,
                self.state,
                index=input_batch.idx_mapping.int(),
                num_sampled=num_sampled,
                num_rejected=num_rejected,
            )
        # vLLM's scheduler plans no drafts of a large batch; its warm-up may.
        fits = count <= self.state.batch
        drafts_none = num_speculative_tokens == 0 or not fits
        slots = input_batch.idx_mapping_np[:count]
        if input_batch.has_prefill:
            # A text that is shorter than the window drafts nothing until it has grown. By then
            # the levels above the lowest would miss some of it, after the shortest prompts.
            read = input_batch.prefill_len_np[:count] >= self.schedule.shortest_prompt
            begins = input_batch.is_prefilling_np[:count]
            self.stale[slots[begins]] = ~read[begins]
            for learned in (self.thresholds, self.lookup):
                if isinstance(learned, DeviceThresholds | SourcesLookup):
                    learned.forget(
                        async_tensor_h2d(slots[begins], device=self.device, dtype=torch.int64)
                    )
        elif not fits and self.keeps_caches:
            # Passes of all levels would cost a large batch more than its drafts are worth later.
            self.stale[slots] = True
        stale = self.stale[slots]
        if drafts_none or stale.all():
            # Where no length is learned, vLLM asks for no drafts in the last step of all requests.
            drafts_later = fits and self.hsd.adaptive and not stale.all()
            reads = input_batch.has_prefill or (drafts_later and self.keeps_caches)
            alone = reads and not (input_batch.has_prefill or self.checks or stale.any())
            if reads and not (alone and self._keep_up(input_batch, num_sampled)):
                self._ingest(*computed)
            accepted = (num_sampled - 1).clamp(min=0).sum()
            self.state.counts[-1, COUNTS.accepted] += accepted
            self.state.row_of_slot.fill_(-1)
            if self.confidence is not None:
                # As of requests that have drafted nothing yet, where no drafts are asked for.
                self.draft_token_confidence_probs[:count] = float(drafts_none)
            # The target may be fed them, and vLLM leaves -1 in them after steps without drafts.
            return drafts.zero_()
        self._set_longest(input_batch)
        if self.several is not None and count > self.several.batch:
            num_speculative_tokens = self.state.longest
        proposal = self._next_proposal(num_speculative_tokens)
        program = self.programs[proposal]
        size = None if self.graphs is None else self.graphs.size_for(count, proposal)
        state = self.shorter.get(proposal.length, self.state).bucket(size or count)
        self.counts.add_proposal(program.schedule)
        index = input_batch.idx_mapping
        if stale.any():
            mask = async_tensor_h2d(stale, device=self.device, dtype=torch.bool)
            index = index.masked_fill(mask, -1)
        inputs = index, num_sampled
        # First: the runner writes the next steps' parameters into the buffers that it reads.
        self._stage(state, program.schedule, *inputs)
        if input_batch.has_prefill:
            self._ingest(*computed)
        if size is not None:
            for level in self.hosted:
                if level is not None:
                    level.prepare_replay()
        if self.confidence is not None:
            self.confidence.begin(index.long(), self.parameters.temperature * self.scales[-1])
        if self.checks:
            foreign = {"the batch": input_batch, "the table of requests": self.req_states}
            foreign |= {"num_sampled": num_sampled, **self.parameters.tensors()}
            self._run_checked(state, proposal, foreign, inputs)
        elif size is None or self.graphs is None:
            program.run(state)
        else:
            self.graphs.replay(size, proposal)
        if self.confidence is not None:
            self.confidence.publish(self.draft_token_confidence_probs, index.long(), self.drawn)
        if self.branches is not None:
            self.branches.state = state
            self.branches.flat_drafts(slots, self.schedule.window, drafts)
        else:
            drafts[:, : state.longest] = state.draft_tokens[:count]
        return drafts

    def _set_longest(self, input_batch) -> None:
        """What attention may read at most; the lengths themselves are on the device."""
        bound = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs]
        self.longest = (bound + self.schedule.capacity).clamp(max=self.max_model_len)

    def _run_checked(
        self, state: ProposalState, proposal: Proposal, foreign: dict[str, Any], inputs: tuple
    ) -> None:
        """Draft without a graph, on nothing that the runner hands over; then with the graph.

        Raises:
            GraphError: one of the two drafts something else, or cannot be captured.
        """
        program, changed, real = self.programs[proposal], [state.counts], len(inputs[0])
        if self.thresholds is not None:
            changed += [self.thresholds.total, self.thresholds.count]
        if isinstance(self.lookup, SourcesLookup):
            changed += [each for each in vars(self.lookup).values() if torch.is_tensor(each)]
        before = [tensor.clone() for tensor in changed]
        # Lookups search the text in place: its memory does not move.
        with graph_checks.no_foreign_reads(foreign, but=self.req_states.all_token_ids.gpu):
            program.run(state)
        if self.graphs is None or self.graphs.size_for(state.batch, proposal) != state.batch:
            return
        drafted = state.draft_tokens[:real].clone()
        self._stage(state, program.schedule, *inputs)
        for tensor, was in zip(changed, before, strict=True):
            tensor.copy_(was)
        self.graphs.replay(state.batch, proposal)
        replayed = state.draft_tokens[:real]
        if not drafted.equal(replayed):
            raise graph_checks.GraphError(
                f"the CUDA graph for {state.batch} requests drafts {replayed.tolist()}, the same "
                f"proposal without a graph {drafted.tolist()}."
            )

    def _stage(self, state, schedule, index, num_sampled, verified=-1) -> None:
        """Begin a proposal; nothing after it reads what the runner hands over."""
        stage(
            state,
            schedule,
            index=index.int(),
            text=self.req_states.all_token_ids.gpu,
            length=self.req_states.total_len.gpu,
            num_sampled=num_sampled,
            **self.parameters.tensors(),
            scales=self.scales,
            max_model_len=self.max_model_len,
            verified=verified,
        )

    def _ingest(self, input_batch, attn_metadata, slot_mappings, with_logits=False) -> None:
        """Let every model compute what the target has computed in this step.

        Entries of rejected tokens are after the text and are overwritten before they are read. Next
        to prompts the other requests' tokens are computed too, which a proposal that catches up
        would do again: a batch of the prompts alone would need attention metadata of its own.
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
