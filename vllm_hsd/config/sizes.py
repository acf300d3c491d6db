"""Batches, lengths and the schedule that follow from a cascade's configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vllm_hsd.cascade.schedule import Schedule, compile_schedule
from vllm_hsd.config import platform
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.levels import LevelConfig

# Where nothing else is configured: for as many requests the rows that drafts were drawn from take
# 0.16 GB for 8 tokens of a vocabulary of 152,000 in bfloat16, and above it decoding is no longer
# bound by the memory that it reads.
MAX_BATCH_SIZE = 64
# Tokens of the target's pass up to which further ones cost little on a GPU. Branches are computed
# whether they are there or not, so where nothing is configured they end at as many.
MAX_BRANCH_TOKENS = 256


def reads_target_states(hsd: CascadeConfig) -> bool:
    """Whether a level reads hidden states of the target."""
    return any(source.reads_target_states for level in hsd.levels for source in level.drafters)


def longest_query(hsd: CascadeConfig, schedule: Schedule) -> int:
    """Most tokens that a request feeds to one forward pass: a head reads a step of the target."""
    steps = hsd.num_speculative_tokens + 1 if reads_target_states(hsd) else 0
    return max(schedule.longest_query, steps)


def max_batch_size(hsd: CascadeConfig, longest_query: int, max_num_batched_tokens: int) -> int:
    """Most requests of a step that drafts.

    torch.compile covers forward passes of at most max_num_batched_tokens.

    Args:
        longest_query: tokens that one request feeds to a forward pass at most.

    Raises:
        UserError: not even one request can draft.
    """
    limit = default_limit(hsd)
    if not longest_query:
        return limit
    if longest_query > max_num_batched_tokens:
        raise UserError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, but a request feeds "
            f"{longest_query} tokens to a level at once: raise it or lower num_tokens of the "
            "levels."
        )
    return min(limit, max_num_batched_tokens // longest_query)


def default_limit(hsd: CascadeConfig) -> int:
    """Most requests of a step that drafts, by the configuration of the cascade alone."""
    # Without `adaptive`, requests above the limit of branches draft a chain each.
    branching = most_with_branches(hsd) if hsd.adaptive else MAX_BATCH_SIZE
    return hsd.disable_by_batch_size or branching


def most_with_branches(hsd: CascadeConfig) -> int:
    """Most requests of a step whose drafts have branches; of a step that drafts without any."""
    if hsd.disable_by_batch_size or hsd.branches == 1 or platform.read_on_host():
        return hsd.disable_by_batch_size or MAX_BATCH_SIZE
    tokens = hsd.branches * (hsd.num_speculative_tokens + 1)
    return min(MAX_BATCH_SIZE, max(1, MAX_BRANCH_TOKENS // tokens))


def reads_texts(levels: Iterable[LevelConfig]) -> bool:
    """Whether a level reads the requests' own texts."""
    return any(source.reads_texts for level in levels for source in level.drafters)


def by_batch_size(hsd: CascadeConfig, limit: int) -> list[tuple[int, int, int]]:
    """The longest drafts; with `adaptive` each shorter length once, to be captured.

    Without it, chains alone where there are more requests than branches are for.
    """
    rows, most = hsd.branches, most_with_branches(hsd)
    if most < limit and not hsd.adaptive:
        chain = hsd.num_speculative_tokens
        longest = hsd.scheduled_tokens
        return [(1, most, longest), (most + 1, limit, chain), (limit + 1, limit + 1, 0)]
    shorter = [rows * (n + 1) - 1 for n in ladder_of(hsd)[1:limit]]
    first = limit - len(shorter)
    each = [(first + i, first + i, n) for i, n in enumerate(shorter, 1)]
    return [(1, first, hsd.scheduled_tokens), *each, (limit + 1, limit + 1, 0)]


def schedule_of(hsd: CascadeConfig, longest: int | None = None) -> Schedule:
    """The fixed schedule of a cascade.

    Args:
        longest: most tokens of a proposal, with at least one for each level before the horizontal
            ones; None for the configured number.

    Raises:
        UserError: what a fixed schedule cannot do.
    """
    options, lowest = list(hsd.options()), hsd.levels[0]
    if hsd.adaptive and platform.read_on_host() and lowest.last_drafts_by == "lookup":
        # Right below the target a lookup costs nothing but verification.
        options[0].draft_length = options[-1].draft_length
    longest_drafts = options[0].draft_length, options[-1].draft_length
    if longest is not None:
        options[-1] = replace(options[-1], draft_length=longest)
        room = longest - hsd.horizontal_tokens
        for k in reversed(range(len(options) - 1)):
            room = min(options[k].draft_length, room - 1)
            options[k] = replace(options[k], draft_length=room)
    return compile_schedule(
        options,
        lookup=lowest.last_drafts_by == "lookup",
        chooses=lowest.drafts_by == "lookup" != lowest.last_drafts_by,
        drafts=hsd.branches if hsd.several_drafts else 1,
        horizontal_tokens=hsd.horizontal_tokens,
        longest_drafts=longest_drafts,
        bounded=not platform.read_on_host(),
    )


def learns_one_length(hsd: CascadeConfig) -> bool:
    """Whether `adaptive` chooses a length for all requests of a step, before it is scheduled.

    Not where scheduling waits for drafts, of any length.
    """
    return hsd.adaptive and not platform.read_on_host()


def ladder_of(hsd: CascadeConfig) -> list[int]:
    """Draft lengths that the scheduler may choose between, longest first; the first is configured.

    With `adaptive` a half and a quarter of it too: vLLM captures the target for each length. With
    `branches` they are those of one row.
    """
    longest = hsd.num_speculative_tokens
    shorter = {longest // 2, longest // 4} if learns_one_length(hsd) else set()
    return [longest, *sorted((n for n in shorter if n >= shortest_of(hsd)), reverse=True)]


def shortest_of(hsd: CascadeConfig) -> int:
    """Tokens of the shortest proposal: one of every level."""
    return len(hsd.levels) + hsd.horizontal_tokens
