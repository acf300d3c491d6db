"""Random states of a proposal, for the kernels between forward passes and their reference."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map_only

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import Schedule, compile_schedule

VOCABULARY, MAX_MODEL_LEN, MAX_NUM_REQS = 70, 40, 7
GUARD = -(2**31) + 7
# Row and lane counts that no power of two hides.
LENGTHS = (2, 3, 7)


def schedule_of(*lengths: int, rounds: Sequence[int | None] = (), **kind) -> Schedule:
    """A compiled cascade; rounds: max_rounds of the levels from the second on."""
    limits = [None, *rounds, *[None] * len(lengths)]
    options = [LevelOptions(n, max_rounds=limits[k]) for k, n in enumerate(lengths)]
    return compile_schedule(options, **kind)


def state_of(
    schedule: Schedule,
    batch: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    lookup: bool = False,
    slots: int = MAX_NUM_REQS,
    groups: int = 1,
    device: torch.device | str = "cpu",
) -> ProposalState:
    """Of levels whose rows have one type, but for a lookup below them."""
    return ProposalState.allocate(
        schedule,
        batch=batch,
        max_num_reqs=slots,
        vocab_size=vocab_size,
        dtypes=[None if lookup and k == 0 else dtype for k in range(schedule.num_levels)],
        num_kv_groups=groups,
        device=torch.device(device),
    )


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what no kernel may read or leave behind."""
    return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else GUARD)


def poison_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch leaves unwritten of the memory that is allocated from here on shows."""
    allocate = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: poison(allocate(*size, **options)))


class TableLevel:
    """A level whose next-token logits [V, V] depend on the last token only: it needs no cache."""

    in_target_cache = False

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def forward(self, state: ProposalState, op, num_logits: int) -> torch.Tensor:
        fed = state.input_ids[: state.batch * op.query_length].view(state.batch, -1).long()
        return self.logits[fed[:, op.query_length - num_logits :].flatten()]


class GuardedState:
    """A `ProposalState` whose tensors are the middle of larger ones, which must not change."""

    def __init__(
        self, schedule, batch: int, lookup: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        kind = {"lookup": lookup, "groups": 2, "device": device}
        state = state_of(schedule, batch, VOCABULARY, torch.bfloat16, **kind)
        # Name, what is around, and the tensor in its middle.
        self.guarded: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, value in vars(state).items():
            if name not in ("request", "draft_lengths", "counts", "row_starts"):
                guard = partial(self._guarded, name)
                setattr(state, name, tree_map_only(torch.Tensor, guard, value))
        self.state = state

    def _guarded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        # Before and after each dimension: two-dimensional ones get guards around every row.
        guards: tuple[int, ...] = {1: (2,), 2: (1, 2), 3: (1, 0, 0)}[tensor.ndim]
        if name in ("draft_tokens", "lse"):
            guards = 1, 0  # rows that kernels expect to be contiguous
        shape = [n + 2 * guard for n, guard in zip(tensor.shape, guards, strict=True)]
        outer = poison(torch.empty(shape, dtype=tensor.dtype, device=tensor.device))
        inner = outer
        for d, guard in enumerate(guards):
            inner = inner.narrow(d, guard, tensor.shape[d])
        inner.copy_(tensor)
        self.guarded.append((name, outer, inner))
        return inner

    def assert_guards(self) -> None:
        """Nothing outside the tensors was written."""
        for name, outer, inner in self.guarded:
            kept = outer.clone()
            offset = inner.storage_offset()
            torch.as_strided(kept, inner.shape, inner.stride(), offset).copy_(
                poison(torch.empty_like(inner))
            )
            same = kept.isnan() if kept.dtype.is_floating_point else kept == GUARD
            assert same.all(), name


def assert_equal_states(one: ProposalState, other: ProposalState) -> None:
    """Equal in every entry, NaN where the other one is NaN; on any devices."""
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True, "check_device": False}
    torch.testing.assert_close(vars(one), vars(other), **exactly)


def copied(state: ProposalState) -> ProposalState:
    """A copy on the CPU."""
    return ProposalState(**tree_map_only(torch.Tensor, lambda t: t.cpu().clone(), vars(state)))


def block_tables(seed: int, sizes=(4, 16), device="cpu") -> tuple[KVGroups, list[torch.Tensor]]:
    """Tables of two KV-cache groups, blocks in random order."""
    g = torch.Generator().manual_seed(seed)
    tables = []
    for size in sizes:
        blocks = -(-MAX_MODEL_LEN // size)
        order = torch.randperm(MAX_NUM_REQS * blocks, generator=g, dtype=torch.int32)
        tables.append(order.view(MAX_NUM_REQS, blocks).contiguous().to(device))
    groups = KVGroups(
        torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64, device=device),
        torch.tensor([t.stride(0) for t in tables], device=device),
        torch.tensor(sizes, dtype=torch.int32, device=device),
    )
    return groups, tables


def runner_tensors(seed: int, num_reqs: int, window: int) -> dict:
    """What `stage` reads: short texts, prompt chunks, texts near max_model_len, greedy requests."""
    g = torch.Generator().manual_seed(seed)
    length = torch.randint(1, MAX_MODEL_LEN + 1, (MAX_NUM_REQS,), generator=g, dtype=torch.int32)
    index = torch.randperm(MAX_NUM_REQS, generator=g)[:num_reqs].to(torch.int32)
    # Two have little room before max_model_len, and are done while others still draft.
    special = [MAX_MODEL_LEN - 4, MAX_MODEL_LEN - 5, window - 1, MAX_MODEL_LEN - 1, window]
    for b, n in enumerate(special[: max(num_reqs - 1, 0)]):
        length[index[b]] = n
    num_sampled = torch.ones(num_reqs, dtype=torch.int32)
    num_sampled[: num_reqs // 2] += 2
    num_sampled[-1:] = seed % 2
    temperature = torch.rand(MAX_NUM_REQS, generator=g) + 0.5
    temperature[::3] = 0
    temperature[1::5] *= -1
    # A request that drafts little, and one that drafts nothing.
    most_drafted = torch.full((MAX_NUM_REQS,), 99, dtype=torch.int32)
    most_drafted[(seed + torch.arange(2)) % MAX_NUM_REQS] = torch.tensor([0, 2], dtype=torch.int32)
    return {
        "index": index,
        "text": torch.randint(0, 5, (MAX_NUM_REQS, MAX_MODEL_LEN), generator=g, dtype=torch.int32),
        "length": length,
        "num_sampled": num_sampled,
        "temperature": temperature,
        "top_k": torch.randint(0, 9, (MAX_NUM_REQS,), generator=g, dtype=torch.int32),
        "top_p": torch.rand(MAX_NUM_REQS, generator=g),
        "min_p": torch.rand(MAX_NUM_REQS, generator=g),
        "seeds": torch.randint(-(2**62), 2**62, (MAX_NUM_REQS,), generator=g),
        "most_drafted": most_drafted,
        "max_model_len": MAX_MODEL_LEN,
    }
