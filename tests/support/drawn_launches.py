"""What a cascade of a model launches that draws several drafts; see `support.kernel_launches`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_hsd.cascade import cascade_steps, several_drafts
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import compile_schedule
from vllm_hsd.kernels.drawn_rows import verify_drawn_rows
from vllm_hsd.kernels.filter_rows import Filters

_BATCH, _SLOTS, _LONGEST = 3, 256, 40960


@dataclass(frozen=True)
class SeveralDrafts:
    """The proposal, and the verification of its sampled requests."""

    rows: int = 4
    length: int = 8
    dtype: torch.dtype = torch.bfloat16
    vocab_size: int = 151936

    def launch(self) -> None:
        """Launch what a step does."""
        schedule = compile_schedule([LevelOptions(self.length)], drafts=self.rows)
        state = ProposalState.allocate(
            schedule,
            batch=8,
            max_num_reqs=_SLOTS,
            vocab_size=self.vocab_size,
            dtypes=[self.dtype],
            num_kv_groups=1,
            device=torch.device("meta"),
        )
        kept = several_drafts.SeveralDrafts.allocate(state, self.rows, [2, 4, 8], most=4)
        bucket = state.bucket(4)
        requests = _empty(_SLOTS), _floats(_SLOTS), _floats(_SLOTS)
        cascade_steps.stage(
            bucket,
            schedule,
            index=_empty(_BATCH),
            text=_empty(_SLOTS, _LONGEST),
            length=_empty(_SLOTS),
            num_sampled=_empty(_BATCH),
            temperature=_floats(_SLOTS),
            **Filters(*requests)._asdict(),
            seeds=_longs(_SLOTS),
            most_drafted=_empty(_SLOTS),
            scales=_floats(1),
            max_model_len=_LONGEST,
        )
        groups = KVGroups(_empty(1, dtype=torch.uint64), _longs(1), _empty(1))
        for drawn in (schedule, schedule.with_one_draft()):
            several_drafts.SeveralDraftsProgram(
                drawn, [self], ["block"], groups, _LONGEST, kept=kept
            ).run(bucket)
        inputs = _BATCH * self.rows * (self.length + 1)
        padded = -(-self.vocab_size // 64) * 64
        # The model's own logits; those of a padded head; with all sampling parameters applied.
        for dtype, width in ((self.dtype, self.vocab_size), (self.dtype, padded), (None, padded)):
            target = _empty(inputs, width, dtype=dtype or torch.float32)[:, : self.vocab_size]
            for thresholds in (None, _floats(inputs)) if dtype else (None,):
                chain = bucket.rows[0]
                assert chain is not None
                verify_drawn_rows(
                    target,
                    chain,
                    kept.rows,
                    _empty(inputs),
                    _empty(_BATCH + 1),
                    _empty(_BATCH, self.rows),
                    _empty(_BATCH),
                    *(_floats(_BATCH) for _ in range(2)),
                    *(_longs(_BATCH) for _ in range(2)),
                    thresholds=thresholds,
                )

    in_target_cache = False

    def forward(self, state: ProposalState, op, num_logits: int) -> torch.Tensor:
        """Logits of a model that computes nothing."""
        return _empty(state.batch * num_logits, self.vocab_size, dtype=self.dtype)


def _empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _longs(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int64)


def _floats(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32)
