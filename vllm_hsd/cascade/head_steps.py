"""What an EAGLE-3 head is fed; grids depend only on shapes.

`read_step` and `next_tokens` read the target's step, before anything of a proposal runs.
`place_entry` is a part of proposals, as the steps of `cascade_steps` are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import Schedule
from vllm_hsd.kernels import head_kernels
from vllm_hsd.kernels.blocks import padded_size

# Tokens of a step of the target that one program copies.
TOKEN_CHUNK = 1024


class Pass(NamedTuple):
    """Inputs of a forward pass that feeds q tokens for each of B requests; see `ProposalState`.

    Attributes:
        input_ids: int32 [B * q].
        positions: int64 [B * q].
        seq_lens: int32 [B].
        query_start_loc: int32 [B + 1].
        slot_mapping: int64 [G, B * q].
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, q: int, num_kv_groups: int, device: torch.device) -> Pass:
        """For at most `batch` requests."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(batch * q),
            positions=zeros(batch * q, dtype=torch.int64),
            seq_lens=zeros(batch),
            query_start_loc=zeros(batch + 1),
            slot_mapping=zeros(num_kv_groups, batch * q, dtype=torch.int64) - 1,
        )

    @property
    def batch(self) -> int:
        """B."""
        return len(self.seq_lens)

    @property
    def query_length(self) -> int:
        """q."""
        return len(self.input_ids) // self.batch

    def bucket(self, batch: int) -> Pass:
        """The first `batch` requests: views of the same memory."""
        fed = batch * self.query_length
        return Pass(
            self.input_ids[:fed],
            self.positions[:fed],
            self.seq_lens[:batch],
            self.query_start_loc[: batch + 1],
            self.slot_mapping[:, :fed],
        )


@dataclass
class HeadInputs:
    """Inputs of a head's passes, for at most B requests of which q entries are read at once.

    Attributes:
        reading: the first pass of a proposal.
        source: int64 [B * q], places in the target's step of the states that its entries read.
        last: int64 [B], which of its entries reads a request's last token.
        states: [B * q, H] the target's states as the head reads them.
        drafting: a pass of one entry.
        own: [B, S, H] what the entries of the last committed token and of drafted ones read; the
            last one is never read.
        reads, writes: int64 [B], places in `own` of a pass of one entry, as of [B * S, H].
    """

    reading: Pass
    source: torch.Tensor
    last: torch.Tensor
    states: torch.Tensor
    drafting: Pass
    own: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor

    @classmethod
    def allocate(
        cls,
        schedule: Schedule,
        *,
        batch: int,
        query_length: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> HeadInputs:
        """For one KV-cache group, see `set_kv_groups`.

        Args:
            schedule: of the longest drafts.
            batch: B.
            query_length: q.
            hidden_size: H.
            dtype: of states.
            device: of everything.
        """
        passes = (Pass.allocate(batch, q, 1, device) for q in (query_length, 1))
        source = torch.zeros(batch * query_length, dtype=torch.int64, device=device)
        # The last committed token's, and what nothing reads.
        kept = schedule.capacity - schedule.window + 3
        return cls(
            next(passes),
            source,
            source.new_zeros(batch),
            torch.zeros(batch * query_length, hidden_size, dtype=dtype, device=device),
            next(passes),
            torch.zeros(batch, kept, hidden_size, dtype=dtype, device=device),
            source.new_zeros(batch),
            source.new_zeros(batch),
        )

    def set_kv_groups(self, number: int) -> None:
        """Make room for the places of that many KV-cache groups."""
        self.reading, self.drafting = (
            each._replace(
                slot_mapping=each.slot_mapping.new_full((number, len(each.input_ids)), -1)
            )
            for each in (self.reading, self.drafting)
        )


def next_tokens(
    input_ids: torch.Tensor,
    index: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    longest: int,
) -> None:
    """Write for every token of the target's step the one after it; any one where there is none.

    Args:
        input_ids: int32 [T].
        index: [num_reqs], request slots of the batch.
        query_start_loc: int32 [num_reqs + 1].
        positions: int64 [T].
        text: int32 [max_num_reqs, max_model_len or more], all tokens of the requests.
        length: int32 [max_num_reqs], tokens in the text.
        longest: most tokens of a request in the step.
    """
    head_kernels.next_tokens_kernel[(len(index), triton.cdiv(longest, TOKEN_CHUNK))](
        input_ids,
        index,
        query_start_loc,
        positions,
        text,
        text.stride(0),
        length,
        CHUNK=TOKEN_CHUNK,
        num_warps=1,
    )


def read_step(
    inputs: HeadInputs,
    groups: KVGroups,
    max_model_len: int,
    *,
    index: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
) -> None:
    """Write the inputs of the first pass of a proposal, but for the states.

    It computes the last q entries whose states the target's step has computed. Only entries of this
    step are written; rows after the last token hold anything, since nothing before attends to them.

    Args:
        inputs: of at least len(index) requests; the others become padding.
        groups: block tables of the KV-cache groups.
        max_model_len: positions end before it.
        index, query_start_loc, positions, text, length: see `next_tokens`.
    """
    reading, q = inputs.reading, inputs.reading.query_length
    head_kernels.read_step_kernel[(reading.batch, len(reading.slot_mapping))](
        *reading,
        reading.slot_mapping.stride(0),
        inputs.source,
        inputs.last,
        index,
        query_start_loc,
        positions,
        text,
        text.stride(0),
        length,
        *groups,
        len(index),
        max_model_len,
        QUERY=q,
        LANES=padded_size(q),
        num_warps=1,
    )


def place_entry(
    inputs: HeadInputs,
    state: ProposalState,
    schedule: Schedule,
    back: int,
    groups: KVGroups,
    max_model_len: int,
) -> None:
    """Write the inputs of the entry of the token `back` places before the last one.

    A KV entry is written where the request still drafts and the token is not committed.

    Args:
        schedule, state: what runs.
        groups, max_model_len: see `read_step`.
    """
    one, top = inputs.drafting.bucket(state.batch), schedule.num_levels - 1
    head_kernels.place_entry_kernel[(state.batch, len(one.slot_mapping))](
        *one,
        one.slot_mapping.stride(0),
        inputs.reads,
        inputs.writes,
        state.num_reqs,
        *state.windows,
        state.base,
        state.end,
        state.drafted[top],
        state.requested[top],
        state.limit,
        state.slot,
        *groups,
        back,
        max_model_len,
        WINDOW=schedule.window,
        STATES=inputs.own.shape[1],
        num_warps=1,
    )
