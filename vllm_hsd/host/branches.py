"""Several drafts of a request in one pass of the target, with nothing on the host.

Rows have the blocks that `cascade.row_layout` says, and share no token. The scheduler plans a list
of draft tokens for a request, whose length the host knows: rows of equal length, each after the
request's last verified token, its root. Positions, slots and blocks follow on the device, where
alone it is known how many tokens of the last step were kept. What attention reads of the rows stays
in place: a step in which all requests have whole lists may be a full CUDA graph of vLLM's, captured
with as many rows of each request.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.cascade.several_drafts import SeveralDrafts
from vllm_hsd.config.sizes import ladder_of
from vllm_hsd.errors import UserError
from vllm_hsd.host.branch_caches import OTHER_LAYOUT, BranchCaches
from vllm_hsd.host.graphs import limit_batches
from vllm_hsd.host.hooks import REGISTRY, RUNNER, replace_on
from vllm_hsd.kernels import branch_kernels
from vllm_hsd.kernels.blocks import aligned, padded_size
from vllm_hsd.kernels.branch_walk import follow_branches
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.copy_blocks import BranchRows

logger = init_logger(f"vllm.{__name__}")
_PREPARE = f"{RUNNER}.prepare_attn"
_METADATA = "vllm.v1.worker.gpu.model_states.default.DefaultModelState.prepare_attn"
_UNTIL = "vLLM verifies trees"


class Step(NamedTuple):
    """A step in which requests have branches.

    Attributes:
        batch: vLLM's.
        length: most tokens of a row after its root.
        several: bool [num_reqs] on the host, the requests that have them.
        rows: of the batch on the device.
        tables: by KV-cache group, int32 [rows, width].
        inputs: int32 [num_logits], input token of each row of logits.
    """

    batch: Any
    length: int
    several: np.ndarray
    rows: BranchRows
    tables: tuple[torch.Tensor, ...]
    inputs: torch.Tensor


class HostedBranches:
    """The branches of a runner's requests.

    Args:
        runner: vLLM's, whose models are loaded.
        state: of proposals of the longest drafts.
        lookup: what gives the branches: `branches` and `branch_counts` of the last proposal.
        chained: bool [max_num_reqs] on the host, requests that have to do without.

    Attributes:
        buffers: vLLM's of the batch, with `query_start_loc` and `seq_lens` of the rows.
        tables: by KV-cache group, int32 [max_num_reqs, width], block tables of the rows.
        state: of the last proposal, whose drafts may be shorter.
        lengths: tokens of a request that has all rows -> most tokens of a row after its root.
        largest: most requests that have all rows.
        shown: a batch, and what attention sees in its place: a request for every row.
        step: in which requests have branches, until it is verified.
        room: drafts of a request for which there are blocks.
        listed: int64 [B], tokens of each request's list; None where lists have all rows.

    Raises:
        UserError: the engine's configuration does not go with branches.
    """

    def __init__(
        self,
        runner: Any,
        state: ProposalState,
        lookup: SourcesLookup | SeveralDrafts,
        chained: np.ndarray,
    ) -> None:
        self.runner, self.state, self.lookup, self.chained = runner, state, lookup, chained
        self.longest, self.most = state.longest, lookup.branches.shape[1] + 1
        self.largest = runner.max_num_reqs // self.most
        config = runner.vllm_config
        ladder = ladder_of(config.speculative_config.hsd)
        self.lengths = {self.most * (length + 1): length for length in ladder}
        for mistake in config.speculative_config.branch_mistakes(config):
            raise UserError(mistake)
        device, requests = runner.device, runner.max_num_reqs

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.counts = zeros(requests, self.most)
        self.buffers = copy.copy(runner.input_buffers)
        self.buffers.query_start_loc, self.buffers.seq_lens = zeros(requests + 1), zeros(requests)
        self.chains = zeros(requests)
        self.bases = zeros(requests, dtype=torch.int64)
        self.winner, self.emitted = zeros(requests), zeros(requests)
        self.offsets: dict[int, torch.Tensor] = {}
        self.tables: list[torch.Tensor] = []
        self.caches = BranchCaches(runner)
        self.shown: tuple[Any, Any] | None = None
        self.step: Step | None = None
        self.listed: np.ndarray | None = None
        self.verified = 0
        replace_on(runner, _PREPARE, by=self)
        replace_on(runner.model_state, _METADATA, by=self)

    @property
    def length(self) -> int:
        """Most tokens of a row after its root, in the last proposal."""
        return self.state.longest

    def length_of(self, batch: Any) -> int | None:
        """The same of a batch in which all requests have whole lists; None for any other."""
        tokens = batch.num_scheduled_tokens
        return self.lengths.get(int(tokens[0])) if (tokens == tokens[0]).all() else None

    def set_attn(self, kv_cache_config: Any) -> None:
        """Make room for the rows' block tables; caches are looked up when a step needs them.

        Raises:
            UserError: the cache has no room for branches, or blocks of several sizes; or attention
                takes rows of other lengths for prompts, whose lengths have to be exact.
        """
        config, groups = self.runner.vllm_config, kv_cache_config.kv_cache_groups
        for group in itertools.chain(*self.runner.attn_groups):
            support = getattr(group.get_metadata_builder(), "query_len_support", None)
            varies = support is None or support.name == "VARLEN"
            if config.scheduler_config.async_scheduling and not varies:
                raise UserError(
                    f"levels[0].branches does not run with the attention backend "
                    f"{group.backend.get_name()}: remove branches, or choose another."
                )
        if config.cache_config.num_gpu_blocks is not None:  # not while vLLM profiles memory
            blocks = kv_cache_config.num_blocks
            if mistake := config.speculative_config.room_mistake(config, blocks, len(groups)):
                raise UserError(mistake)
            if {*self.runner.block_tables.block_sizes} != {config.cache_config.block_size}:
                raise UserError(OTHER_LAYOUT)
            logger.info(
                "At most %d requests of a step have all their drafts: max_num_seqs is %d.",
                self.largest,
                self.runner.max_num_reqs,
            )
        # Not with the weights, which sleep mode may discard.
        rows = torch.arange(self.most, dtype=torch.int32, device=self.runner.device)
        rows = rows.repeat(self.runner.max_num_reqs, 1)
        self.offsets = {length: rows * (length + 1) for length in self.lengths.values()}
        self.tables = [torch.zeros_like(t.gpu) for t in self.runner.block_tables.block_tables]
        self.caches.forget()

    def limit_graphs(self) -> None:
        """Leave out the target's graphs of batches that have more rows than attention has room."""
        for tokens in self.lengths:
            limit_batches(self.runner.cudagraph_manager, tokens, self.largest)

    def flat_drafts(self, slots: np.ndarray, window: int, drafts: torch.Tensor) -> None:
        """Write what is scheduled of the last proposal, and cut its branches to their blocks.

        Args:
            slots: [B] of the proposal's requests.
            window: tokens of the proposal's window that are committed.
            drafts: int64 [B, rows * (length + 1) - 1].
        """
        state, lookup = self.state, self.lookup
        chained = async_tensor_h2d(self.chained[slots].astype(np.int32), device=drafts.device)
        sizes = self.runner.block_tables.block_sizes_tensor
        branch_kernels.flat_drafts_kernel[(len(slots),)](
            drafts,
            drafts.stride(0),
            state.draft_tokens[:, : self.length].contiguous(),
            lookup.branches[..., : self.length].contiguous(),
            lookup.branch_counts,
            *state.windows,
            state.base,
            chained,
            sizes,
            len(sizes),
            self.runner.max_model_len,
            self.length,
            WINDOW=window,
            BRANCHES=self.most - 1,
            LANES=padded_size(self.longest + 1),
            num_warps=1,
        )
        state.counts[-1, Count.drafted] += lookup.branch_counts[: len(slots)].sum()

    def prepare(
        self, batch: Any, tables: tuple[torch.Tensor, ...], slot_mappings: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Give every branch of a batch its positions, its slots and its share of the text.

        Returns:
            block tables of the rows, or the given ones where no request has branches.
        """
        self.step = self.shown = None
        scheduled, drafts = batch.num_scheduled_tokens, batch.num_draft_tokens_per_req
        room, of_all = self.runner.max_num_reqs, self.length_of(batch)
        # Such a batch may replay a CUDA graph, in which all requests have as many rows.
        uniform = of_all is not None and batch.num_reqs_after_padding <= self.largest
        # Prompts never do, and a row of one would not see an image that goes on in the next.
        uniform &= batch.decode_graph_eligible
        length = self.length if of_all is None or not uniform else of_all
        several, width = np.zeros(batch.num_reqs, dtype=bool), length + 1
        if drafts is not None and length == self.length:
            # What a request is padded with while its prompt is read are no drafts; and longer lists
            # are of requests that the last proposal did not draft for, or forced by a grammar.
            several = (drafts > length) & (drafts < self.most * width) & ~batch.is_prefilling_np
            several &= self.runner.speculator.forced[batch.idx_mapping_np[: batch.num_reqs]] == 0
        rows_of = -(-scheduled // width)
        if not uniform:
            # Attention has room for max_num_seqs rows: a list in one row is its chain, and nothing
            # is kept behind it.
            several &= np.cumsum((rows_of - 1) * several) <= room - batch.num_reqs
            if not several.any():
                return tables
            rows_of = np.where(several, rows_of, 1)
        request = np.repeat(np.arange(len(rows_of)), rows_of)
        row = np.arange(len(request)) - np.repeat(np.cumsum(rows_of) - rows_of, rows_of)
        # Rows of a chain alone go on from one another.
        before, branch = row * width, row * several[request]
        tokens = scheduled[request] - before
        tokens = np.where(rows_of[request] > 1, np.minimum(tokens, width), tokens)
        start = batch.query_start_loc_np[request] + before
        ends = batch.seq_lens_cpu_upper_bound.numpy()[request] - scheduled[request] + tokens
        ends = (ends + before - branch * width).astype(np.int32)
        n, count = len(request), self.counts[: batch.num_reqs].zero_()
        padded = n + self.most * (batch.num_reqs_after_padding - batch.num_reqs)
        # Of whole 16 bytes each, so that kernels are not compiled for every alignment.
        found = np.zeros((4, -(-n // 4) * 4), dtype=np.int32)
        found[:, :n] = request, branch, start, tokens
        device = async_tensor_h2d(found, device=self.runner.device)[:, :n]
        rows = BranchRows(device[0], device[1], self.chains[:n], self.bases[:n])
        # Rows of padding have no tokens.
        starts = np.full(room + 1, batch.num_tokens, dtype=np.int32)
        starts[:n] = start
        async_tensor_h2d(starts, out=self.buffers.query_start_loc)
        self.buffers.seq_lens.zero_()
        copied = bool(several.any())
        self._lay_out(batch, tables, slot_mappings, rows, device, count, length, copied)
        shown = replace(
            batch,
            # By which image-text models look up what of a row is an image.
            req_ids=[batch.req_ids[i] for i in request],
            num_reqs=n,
            num_reqs_after_padding=padded,
            idx_mapping_np=batch.idx_mapping_np[request],
            num_scheduled_tokens=tokens,
            query_start_loc_np=starts[: padded + 1],
            query_start_loc=self.buffers.query_start_loc[: padded + 1],
            seq_lens=self.buffers.seq_lens[:padded],
            seq_lens_cpu_upper_bound=torch.from_numpy(np.pad(ends, (0, padded - n))),
            is_prefilling_np=batch.is_prefilling_np[request],
            prompt_lens=None if batch.prompt_lens is None else batch.prompt_lens[device[0].long()],
        )
        shared = tuple(own[:padded] for own in self.tables)
        self.shown = batch, shown
        if copied:
            # A draft token may be a placeholder's to vLLM, which goes by its place in the list.
            inputs = batch.input_ids[batch.logits_indices]
            self.step = Step(batch, length, several, rows, shared, inputs)
        return shared

    def _lay_out(
        self,
        batch: Any,
        tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        rows: BranchRows,
        device: torch.Tensor,
        count: torch.Tensor,
        length: int,
        copied: bool,
    ) -> None:
        """Write what attention reads of the rows, and the text before the roots if it is copied."""
        sizes = self.runner.block_tables.block_sizes
        # Of vLLM's tables those of the batch: of a window they have what is not freed alone.
        for group, (own, main, size) in enumerate(zip(self.tables, tables, sizes, strict=True)):
            branch_kernels.lay_out_kernel[(len(rows.base),)](
                batch.positions,
                slot_mappings[group],
                own,
                own.stride(0),
                self.buffers.seq_lens,
                rows.chain,
                rows.base,
                count,
                *device,
                batch.idx_mapping,
                self.state.row_of_slot,
                self.lookup.branch_counts,
                main,
                main.stride(0),
                size,
                length,
                FIRST=group == 0,
                BRANCHES=self.most - 1,
                LANES=padded_size(self.longest + 1),
                BLOCK=1024,
            )
            if copied:
                self.caches.begin(group, rows, own[: len(rows.base)])

    def dummy(self, batch: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """What attention sees while a batch of whole lists is captured: (batch, block tables)."""
        rows = batch.num_reqs * self.most
        width = batch.num_tokens // rows
        shown = InputBatch.make_dummy(rows, batch.num_tokens, self.buffers, max_query_len=width)
        return shown, tuple(own[:rows].zero_() for own in self.tables)

    def begin(self, batch: Any) -> None:
        """Verify a batch: `follow` is called for its requests in order, in one or more parts."""
        if self.step is not None and self.step.batch is not batch:
            self.step = None
        self.verified = 0

    def begin_warm_up(self, inputs: int) -> None:
        """Let the verification of one request find branches, none of which has a token."""
        device = self.counts.device
        batch = SimpleNamespace(cu_num_logits_np=np.zeros(1, dtype=np.int32))
        none = torch.zeros(inputs, dtype=torch.int32, device=device)
        rows, several = BranchRows(none, none, none, none), np.ones(1, dtype=bool)
        self.step = Step(batch, self.longest, several, rows, (), none)
        self.offsets = {self.longest: none.new_zeros(1, self.most)}
        self.verified = 0

    def follow(
        self,
        chain: ChainResult,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        draws: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, number of them) that requests emit, see `follow_branches`."""
        step = self.step
        if step is None:
            return chain.token_ids, chain.num_emitted
        first, end = self.verified, self.verified + len(idx_mapping)
        begin = int(step.batch.cu_num_logits_np[first])
        found = follow_branches(
            chain,
            logits,
            aligned(step.inputs[begin : begin + len(logits)]),
            cu_num_logits,
            idx_mapping,
            aligned(self.offsets[step.length][first:end]),
            aligned(self.counts[first:end]),
            draws=draws,
            max_tokens=self.longest,
            **options,
        )
        self.winner[first:end], self.emitted[first:end] = found.winner, found.num_emitted
        self.verified = end
        return found.token_ids, found.num_emitted

    def finish(self) -> None:
        """Copy what the winning branches computed to where the text is."""
        if self.step is None:
            return
        step, followed = self.step, (self.winner, self.emitted)
        self.caches.finish(step.rows, step.tables, *followed, step.length)
        self.step = None


@REGISTRY.replaces_on_runner(
    _PREPARE,
    "self input_batch",
    why="gives the branches of a draft positions, slots and blocks of their own",
    until=_UNTIL,
)
def prepare_attn(original, hosted: HostedBranches, input_batch):
    block_tables, slot_mappings = original(input_batch)
    return hosted.prepare(input_batch, block_tables, slot_mappings), slot_mappings


@REGISTRY.replaces_on_runner(
    _METADATA,
    None,
    why="shows attention a row for every branch of a draft",
    until=_UNTIL,
)
def build_metadata(
    original,
    hosted: HostedBranches,
    input_batch,
    cudagraph_mode,
    block_tables,
    *args,
    for_capture=False,
    **kwargs,
):
    if for_capture and hosted.length_of(input_batch) is not None:
        input_batch, block_tables = hosted.dummy(input_batch)
    elif hosted.shown is not None and hosted.shown[0] is input_batch:
        _, input_batch = hosted.shown
    return original(
        input_batch, cudagraph_mode, block_tables, *args, for_capture=for_capture, **kwargs
    )
