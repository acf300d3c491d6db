"""The cascade on a GPU: proposals of fixed schedules, with nothing on the host.

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

from vllm_hsd.budget.further_passes import FurtherPasses
from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.level import Level
from vllm_hsd.cascade.program import Program
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.several_drafts import SeveralDrafts, SeveralDraftsProgram
from vllm_hsd.config.sizes import (
    ladder_of,
    longest_query,
    most_with_branches,
    schedule_of,
    shortest_of,
)
from vllm_hsd.host.base_speculator import BaseSpeculator
from vllm_hsd.host.graphs import Proposal, ProposalGraphs, batch_sizes, why_eager

logger = logging.getLogger(__name__)


class CascadeSpeculator(BaseSpeculator):
    """A `BaseSpeculator` with CUDA graphs and fixed schedules.

    Attributes:
        program: of the longest drafts.
        shorter: states of shorter drafts by length, in the same memory.
        programs: of all drafts.
        further: whether the model next to lookups runs passes after its first ones.
        stale: bool [max_num_reqs] on the host, slots whose texts the levels have not read whole.
            Their requests draft nothing any more: what a level reads is never left out.
        graphs: captured proposals; None where all run without a CUDA graph.
    """

    def __init__(self, vllm_config, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.stale = np.zeros(self.max_num_reqs, dtype=bool)
        self.graphs: ProposalGraphs | None = None
        self.shorter = self._shorter_states()
        self.several = self._several_drafts()

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

    def _build_programs(self, levels: list[Level], groups: KVGroups) -> None:
        for state in self.shorter.values():
            state.slot_mapping = self.state.slot_mapping
        sources = self._sources()
        if sources is not None:
            self.further = FurtherPasses(cast(SourcesLookup, self.lookup).wanted)
        kind: Callable[..., Program] = Program
        if self.several is not None:
            kind = partial(SeveralDraftsProgram, kept=self.several)
        build = partial(
            kind,
            levels=levels,
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
        self._bound_seq_lens(input_batch)
        counts = self.state.counts.clone()
        state = self.shorter.get(proposal.length, self.state).bucket(size)
        inputs = input_batch.idx_mapping, num_sampled
        self._stage(state, self.programs[proposal].schedule, *inputs)
        self._replay(size, proposal)
        self.state.counts.copy_(counts)
        if isinstance(self.lookup, SourcesLookup) and self.lookup.has_drafter:
            # Of the tokens that are dropped nothing is learned.
            self.lookup.counts[-1].zero_()
        return True

    def _replays_padding(self, count: int) -> bool:
        proposal = Proposal(self.state.longest)
        size = None if self.graphs is None else self.graphs.size_for(count, proposal)
        if self.confidence is None or size is None:
            return False
        self.seq_lens_bound = torch.full((size,), self.max_model_len, dtype=torch.int32)
        none = self.idx_mapping[:0].int()
        self._stage(self.state.bucket(size), self.program.schedule, none, none)
        self._replay(size, proposal)
        return True

    def _replay(self, size: int, proposal: Proposal) -> None:
        """Run a captured proposal on what was staged."""
        for level in self.hosted:
            if level is not None:
                level.prepare_replay()
        assert self.graphs is not None
        self.graphs.replay(size, proposal)

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
    def keeps_caches(self) -> bool:
        """Whether a level misses what it does not compute; lookups and exits do not."""
        return any(level is not None and not level.in_target_cache for level in self.hosted)

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
        self.seq_lens_bound = torch.full((batch,), self.max_model_len, dtype=torch.int32)
        for level in self.hosted:
            if level is not None:
                level.prepare_capture(state, program.schedule)
        none = self.idx_mapping[:0].int()
        self._stage(state, program.schedule, none, none)
        return partial(program.run, state)

    def _propose(self, computed, num_sampled, num_rejected, num_speculative_tokens) -> torch.Tensor:
        input_batch = computed[0]
        count = input_batch.num_reqs
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
            self._forget(async_tensor_h2d(slots[begins], device=self.device, dtype=torch.int64))
        elif not fits and self.keeps_caches and not _warms_up(input_batch):
            # Passes of all levels would cost a large batch more than its drafts are worth later.
            self.stale[slots] = True
        stale = self.stale[slots]
        if drafts_none or stale.all():
            # Where no length is learned, vLLM asks for no drafts in the last step of all requests.
            drafts_later = fits and self.hsd.adaptive and not stale.all()
            reads = input_batch.has_prefill or (drafts_later and self.keeps_caches)
            alone = reads and not (input_batch.has_prefill or stale.any())
            if reads and not (alone and self._keep_up(input_batch, num_sampled)):
                self._ingest(*computed)
            if self.confidence is not None:
                # As of requests that have drafted nothing yet, where no drafts are asked for.
                self.draft_token_confidence_probs[:count] = float(drafts_none)
            return self._propose_nothing(-1, num_sampled, count)
        self._bound_seq_lens(input_batch)
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
        if self.confidence is not None:
            self.confidence.begin(index.long(), self.parameters.temperature * self.scales[-1])
        self._run(state, proposal, size)
        if self.confidence is not None:
            self.confidence.publish(self.draft_token_confidence_probs, index.long(), self.drawn)
        return self._hand_over(state, slots)

    def _run(self, state: ProposalState, proposal: Proposal, size: int | None) -> None:
        """Draft, in a CUDA graph where there is one of this size."""
        if size is None:
            self.programs[proposal].run(state)
        else:
            self._replay(size, proposal)


def _warms_up(input_batch: Any) -> bool:
    """Whether these are requests of vLLM's warm-up, which runs small batches after a large one."""
    return bool(input_batch.req_ids[0].startswith("_warmup_"))
