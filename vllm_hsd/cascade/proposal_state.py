"""What a proposal keeps on the device, from its first kernel to the target."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from vllm_hsd.cascade.schedule import Schedule, Verify
from vllm_hsd.kernels.filter_rows import Filters
from vllm_hsd.kernels.step_kernels import COLUMNS


class KVGroups(NamedTuple):
    """Where the block tables of the KV-cache groups lie, as vLLM's `BlockTables` keeps them.

    Attributes:
        table_ptrs: uint64 [G], addresses of int32 [max_num_reqs, max blocks] tables.
        table_strides: int64 [G], entries from one request to the next.
        block_sizes: int32 [G], tokens per block.
    """

    table_ptrs: torch.Tensor
    table_strides: torch.Tensor
    block_sizes: torch.Tensor


@dataclass
class ProposalState:
    """Buffers of B requests in the order of the batch, L levels, V tokens, a draft of K.

    The text of a request is seen through a window: its last committed tokens, then what is drafted.
    A level's draft begins at `start`, holds `drafted` tokens and was requested to hold `requested`.

    Attributes:
        num_reqs: int32 [1], requests in the batch; the rows after them are padding.
        window: int32 [B, schedule.capacity], the first schedule.window tokens are committed.
        base: int64 [B], position of window[:, 0] in the text.
        end: int32 [B], tokens in the window.
        start, drafted, requested: int32 [L, B].
        origin: int32 [B], place in its level's draft for what the running verification gives, -1
            where the level has no room.
        limit: int64 [B], last position whose KV entry may be written.
        slot: int32 [B], vLLM's request slot, -1 in padding.
        temperature: float32 [L, B] of every level; negative for a coupled request.
        top_k: int32 [B]; top_p, min_p: float32 [B].
        seeds, draws: int64 [B], see `rules.rng`; draws of the length at which the proposal began.
        rows: per level, [B, n, V] logits that its draft tokens were drawn from; None for a lookup.
        lse: per level, float32 [B, n] logsumexps of these rows over the temperature.
        draft_tokens: int64 [B, K], the proposal, filled up with the last token of the text.
        draft_length: int32 [B], tokens of the proposal.
        row_of_slot: int32 [max_num_reqs], row of a request's proposal, -1 for none.
        counts: int64 [L, 4], the first columns of `Count`, then rows of logits that could not be
            sampled; only ever grows.
        draft_lengths: int32 [L], n of every level.
        input_ids: int32 [B * q], of a forward pass with q tokens for each request.
        positions: int64 [B * q].
        seq_lens: int32 [B], tokens in the text, 0 in padding.
        query_start_loc: int32 [B + 1].
        slot_mapping: int64 [G, B * q], places in the KV cache, -1 for nowhere.
        sampled: int32 [B * (n + 1)], input token of each row that is verified.
        request: int32 [B], 0 .. B - 1.
        row_starts: draft length n below a verifying level -> int32 [B + 1], 0, n + 1, ...
    """

    num_reqs: torch.Tensor
    window: torch.Tensor
    base: torch.Tensor
    end: torch.Tensor
    start: torch.Tensor
    drafted: torch.Tensor
    requested: torch.Tensor
    origin: torch.Tensor
    limit: torch.Tensor
    slot: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    draws: torch.Tensor
    rows: list[torch.Tensor | None]
    lse: list[torch.Tensor]
    draft_tokens: torch.Tensor
    draft_length: torch.Tensor
    row_of_slot: torch.Tensor
    counts: torch.Tensor
    draft_lengths: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    sampled: torch.Tensor
    request: torch.Tensor
    row_starts: dict[int, torch.Tensor]

    @classmethod
    def allocate(
        cls,
        schedule: Schedule,
        *,
        batch: int,
        max_num_reqs: int,
        vocab_size: int,
        dtypes: list[torch.dtype | None],
        num_kv_groups: int,
        device: torch.device,
    ) -> ProposalState:
        """Buffers for at most `batch` requests.

        Args:
            schedule: what runs on them.
            batch: B.
            max_num_reqs: request slots of the engine.
            vocab_size: V.
            dtypes: per level, of its logits; None for a lookup.
            num_kv_groups: G.
            device: of everything.
        """

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        levels, lengths = schedule.num_levels, schedule.kept_lengths
        longest = schedule.num_speculative_tokens
        verified = {op.draft_length for op in schedule.ops if isinstance(op, Verify)}
        fed = max(1, schedule.longest_query)
        steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
        return cls(
            num_reqs=empty(1),
            window=empty(batch, schedule.capacity),
            base=empty(batch, dtype=torch.int64),
            end=empty(batch),
            start=empty(levels, batch),
            drafted=empty(levels, batch),
            requested=empty(levels, batch),
            origin=empty(batch),
            limit=empty(batch, dtype=torch.int64),
            slot=torch.full((batch,), -1, dtype=torch.int32, device=device),
            temperature=empty(levels, batch, dtype=torch.float32),
            top_k=empty(batch),
            top_p=empty(batch, dtype=torch.float32),
            min_p=empty(batch, dtype=torch.float32),
            seeds=empty(batch, dtype=torch.int64),
            draws=empty(batch, dtype=torch.int64),
            rows=[
                None if dtype is None else empty(batch, n, vocab_size, dtype=dtype)
                for n, dtype in zip(lengths, dtypes, strict=True)
            ],
            lse=[empty(batch, n, dtype=torch.float32) for n in lengths],
            draft_tokens=empty(batch, longest, dtype=torch.int64),
            draft_length=empty(batch),
            row_of_slot=torch.full((max_num_reqs,), -1, dtype=torch.int32, device=device),
            counts=empty(levels, COLUMNS.value, dtype=torch.int64),
            draft_lengths=torch.tensor(schedule.draft_lengths, dtype=torch.int32, device=device),
            input_ids=empty(batch * fed),
            positions=empty(batch * fed, dtype=torch.int64),
            seq_lens=empty(batch),
            query_start_loc=empty(batch + 1),
            slot_mapping=torch.full(
                (num_kv_groups, batch * fed), -1, dtype=torch.int64, device=device
            ),
            sampled=empty(batch * (max(verified, default=0) + 1)),
            request=steps[:batch],
            row_starts=_row_starts(schedule, steps),
        )

    def shortened(self, schedule: Schedule) -> ProposalState:
        """The same memory for shorter drafts of the same levels."""
        device = self.draft_tokens.device
        steps = torch.arange(self.batch + 1, dtype=torch.int32, device=device)
        return replace(
            self,
            # A whole row for each request, as kernels write it.
            draft_tokens=self.draft_tokens.new_empty(self.batch, schedule.num_speculative_tokens),
            draft_lengths=self.draft_lengths.new_tensor(schedule.draft_lengths),
            row_starts=_row_starts(schedule, steps),
        )

    def lengths_of(self, slots: torch.Tensor) -> torch.Tensor:
        """int32 [n], tokens of the last proposal of each slot, int64 [n]; 0 of slot -1."""
        row = self.row_of_slot[slots.clamp(min=0)]
        length = self.draft_length[row.clamp(min=0).long()]
        return length.masked_fill((row < 0) | (slots < 0), 0)

    @property
    def batch(self) -> int:
        """B."""
        return self.end.shape[0]

    @property
    def longest(self) -> int:
        """K."""
        return self.draft_tokens.shape[1]

    @property
    def lowest_draft(self) -> int:
        """n of level 0, also once shortened."""
        return self.lse[0].shape[1]

    @property
    def filters(self) -> Filters:
        """Of the B requests."""
        return Filters(self.top_k, self.top_p, self.min_p)

    @property
    def windows(self) -> tuple[torch.Tensor, int]:
        """`window` and its stride, as kernels take them."""
        return self.window, self.window.stride(0)

    @property
    def drafts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """`start`, `drafted` and `requested` with their stride, as kernels take them."""
        return self.start, self.drafted, self.requested, self.drafted.stride(0)

    def set_kv_groups(self, number: int) -> None:
        """Make room for the places of that many KV-cache groups."""
        self.slot_mapping = self.slot_mapping.new_full((number, len(self.input_ids)), -1)

    def bucket(self, batch: int) -> ProposalState:
        """The first `batch` requests: views of the same memory, for one CUDA graph."""
        by_request = ("base", "end", "window", "origin", "limit", "slot", "seeds", "draws")
        outputs = ("draft_tokens", "draft_length", "seq_lens", "request")
        names = (*by_request, *Filters._fields, *outputs)
        cut = {name: getattr(self, name)[:batch] for name in names}
        for name in ("start", "drafted", "requested", "temperature"):
            cut[name] = getattr(self, name)[:, :batch]
        cut["rows"] = [None if rows is None else rows[:batch] for rows in self.rows]
        cut["lse"] = [lse[:batch] for lse in self.lse]
        cut["query_start_loc"] = self.query_start_loc[: batch + 1]
        cut["row_starts"] = {n: starts[: batch + 1] for n, starts in self.row_starts.items()}
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in cut}
        return ProposalState(**cut, **kept)


def _row_starts(schedule: Schedule, steps: torch.Tensor) -> dict[int, torch.Tensor]:
    verified = [op.draft_length for op in schedule.ops if isinstance(op, Verify)]
    return {n: steps * (n + 1) for n in range(max(verified, default=-1) + 1)}
