"""The fixed schedule of a cascade: every forward pass of a proposal, known before it runs.

A CUDA graph cannot branch on what was drawn. So the recursion of `tools.reference.cascade` is
unrolled with a fixed number of rounds for every level and one query length for every forward pass;
how much of a round a request really uses is data on the device.

Catch-up rule: when level k of L runs a forward pass, at most L - k + 1 tokens at the end of
the text are missing from its KV cache. A level leaves its last token uncomputed, every verifier
above adds one of its own, and so does the target. So the first pass of a round begins that many
tokens before the end and may compute some of them again. The first pass of a proposal begins
earlier by as many tokens as are horizontal, which only level 0 has computed. A model next to
lookups (`Choose`), or one that draws several drafts, may have computed no token of the draft that
was kept.
tests/host/test_schedule.py proves it by exhaustion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import Any

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.errors import UserError

# Forward passes of one proposal; each is some ten graph nodes per layer.
MAX_FORWARDS = 128
# Draws of one stream that belong to one length of the text, so that no counter is kept: the text
# grows by a token or more between two proposals that are verified.
DRAWS_PER_LENGTH = 1 << 16


@dataclass(frozen=True)
class Draft:
    """Level 0 computes its uncached tokens and draws one more.

    Attributes:
        level: 0.
        step: 0 for the first token of its draft.
        query_length: tokens of each request that are fed, up to the end of the text.
        draw: offset of its uniform, see `DRAWS_PER_LENGTH`.
        row: of several drafts, the one that it goes on with; 0 is the chain.
    """

    level: int
    step: int
    query_length: int
    draw: int
    row: int = 0


@dataclass(frozen=True)
class Lookup:
    """Level 0 finds its whole draft in the text; before a `Choose`, offers of one."""


@dataclass(frozen=True)
class Choose:
    """Level 0 keeps what its model has drafted, or puts a lookup's offer in its place."""


@dataclass(frozen=True)
class Verify:
    """A level computes its uncached tokens and verifies the draft from below.

    Attributes:
        level: at least 1.
        query_length: tokens of each request that are fed, up to the end of a full draft.
        draft_length: most tokens of the draft from below.
        draw: offset of the first of its draft_length + 1 uniforms.
    """

    level: int
    query_length: int
    draft_length: int
    draw: int


Op = Draft | Lookup | Choose | Verify


@dataclass(frozen=True)
class Schedule:
    """A compiled cascade.

    Attributes:
        ops: in the order in which they run, the last ones for the horizontal tokens.
        draft_lengths: most tokens that each level passes up, the last one's are for the target.
        rounds: per level, how many drafts from below it verifies per call; 0 for level 0.
        window: tokens at the end of the text that the first pass of a round may have to feed.
        horizontal_tokens: of level 0 after the top level's draft.
        drafts: that a model draws of each request, see `several_drafts`.
    """

    ops: tuple[Op, ...]
    draft_lengths: tuple[int, ...]
    rounds: tuple[int, ...]
    window: int
    horizontal_tokens: int = 0
    drafts: int = 1

    @property
    def num_levels(self) -> int:
        """L."""
        return len(self.draft_lengths)

    @property
    def num_speculative_tokens(self) -> int:
        """K, most tokens of a proposal."""
        return self.draft_lengths[-1] + self.horizontal_tokens

    @property
    def kept_lengths(self) -> tuple[int, ...]:
        """Most tokens whose rows each level must keep."""
        if not self.horizontal_tokens:
            return self.draft_lengths
        lowest = max(self.draft_lengths[0], self.horizontal_tokens)
        return (lowest, *self.draft_lengths[1:-1], self.num_speculative_tokens)

    @property
    def lengths_for_target(self) -> tuple[int, ...]:
        """Most tokens of each level's draft for the target: what levels above it may pass on."""
        return tuple(min(self.kept_lengths[k:]) for k in range(self.num_levels))

    @property
    def tail(self) -> int:
        """The op with which the horizontal tokens begin."""
        if not self.horizontal_tokens:
            return len(self.ops)
        return len(self.ops) - (1 if isinstance(self.ops[-1], Lookup) else self.horizontal_tokens)

    @property
    def capacity(self) -> int:
        """Tokens that a window on the text must hold: what is committed and what is drafted."""
        return self.window + self.num_speculative_tokens + max(self.draft_lengths)

    @property
    def margin(self) -> int:
        """Tokens by which a proposal stays below the longest text.

        A forward pass is fed a whole draft even where there is room for less. Past the longest text
        there are no blocks to read, and a shorter length would shift what each token attends to.
        """
        fed = [op.draft_length for op in self.ops if isinstance(op, Verify)]
        return max([1, *(n - 1 for n in fed)]) + self.horizontal_tokens

    @cached_property
    def passes(self) -> list[int]:
        """Forward passes of every level."""
        run = [op.level for op in self.ops if isinstance(op, Draft | Verify)]
        return [run.count(k) for k in range(self.num_levels)]

    def with_first_passes(self) -> Schedule:
        """Without the passes of level 0's model after the first one of each of its drafts.

        For a model next to lookups: it drafts one token, and reads as much of the text as ever, so
        that proposals of both schedules may follow each other.
        """
        kept = (op for op in self.ops if not isinstance(op, Draft) or op.step == 0)
        return replace(self, ops=tuple(kept))

    def with_one_draft(self) -> Schedule:
        """Of several drafts the chain alone; proposals of both schedules may follow each other."""
        kept = (op for op in self.ops if not isinstance(op, Draft) or op.step == 0 or op.row == 0)
        return replace(self, ops=tuple(kept), drafts=1)

    def query_lengths(self, level: int) -> tuple[int, ...]:
        """The different query lengths of a level's forward passes, ascending."""
        passes = [op for op in self.ops if isinstance(op, Draft | Verify)]
        return tuple(sorted({op.query_length for op in passes if op.level == level}))

    @property
    def shortest_prompt(self) -> int:
        """Tokens of a prompt below which the last level misses some when it first verifies."""
        last = self.num_levels - 1
        bound = uncached_bound(last, self.num_levels) + self.horizontal_tokens
        return self.window - bound if last else 0

    @property
    def longest_query(self) -> int:
        """Most tokens that a request feeds to one forward pass; 0 without forward passes."""
        return max((q for k in range(self.num_levels) for q in self.query_lengths(k)), default=0)

    @property
    def longest_logits(self) -> int:
        """Most rows of logits per request that one forward pass gives."""
        return max(map(self.num_logits, self.ops))

    def num_logits(self, op: Op) -> int:
        """Rows of logits per request that an op's forward pass must give, the last ones fed."""
        if isinstance(op, Verify):
            return op.draft_length + 1
        return int(isinstance(op, Draft))


def uncached_bound(level: int, num_levels: int, replaced: int = 1) -> int:
    """Most tokens at the end of the text that a level has not computed (catch-up rule).

    Args:
        replaced: tokens of the level's own draft that it has not computed.
    """
    return num_levels - level + replaced


def first_draw(length: Any) -> Any:
    """First draw of every stream for a proposal that begins after `length` tokens, and for the
    target's verification of it. For ints and arrays.
    """
    return length * DRAWS_PER_LENGTH


def compile_schedule(
    options: Sequence[LevelOptions],
    *,
    lookup: bool = False,
    chooses: bool = False,
    drafts: int = 1,
    horizontal_tokens: int = 0,
    longest_drafts: tuple[int, int] = (0, 0),
    bounded: bool = True,
) -> Schedule:
    """Unroll a cascade.

    Args:
        options: one per level, cheapest first; the last draft length is num_speculative_tokens.
            Where max_rounds is None, a level gets as many rounds as it needs to fill its draft if
            every token is accepted.
        lookup: level 0 finds its drafts in the text.
        chooses: level 0 is a model next to lookups.
        drafts: that the only level, a model, draws of each request.
        horizontal_tokens: as configured.
        longest_drafts: most tokens of level 0 and of the last level in any of the schedules that
            serve the same texts; those of this one if fewer.
        bounded: attention kernels take no more tokens of a request than the target's step has.

    Raises:
        UserError: what a fixed schedule cannot do; names the key.
    """
    longest = options[-1].draft_length
    if chooses and (horizontal_tokens or any(o.stopping != "fixed" for o in options)):
        # Drafts that end by what was drawn would let the choice look at it.
        raise UserError(
            "levels[0].sources has a model, with which neither stopping nor horizontal_tokens "
            "goes: remove them."
        )
    scales = options[0].temperature_scale, options[-1].temperature_scale
    if horizontal_tokens and not lookup and scales[0] != scales[1]:
        # A row is kept at one temperature, by which the target reads it.
        raise UserError(
            f"horizontal_tokens is {horizontal_tokens}, which needs the temperature_scale of "
            f"levels[{len(options) - 1}] at levels[0]: set both alike."
        )
    for k, option in enumerate(options):
        # A row is kept at one temperature, by which the next verification reads it.
        below = options[k - 1].temperature_scale if k > int(lookup) else option.temperature_scale
        if option.verifier == "none" and option.temperature_scale != below:
            raise UserError(
                f'levels[{k}].verifier is "none", which needs the temperature_scale of '
                f"levels[{k - 1}] there: set both alike."
            )
    own = longest - horizontal_tokens
    options = [*options[:-1], replace(options[-1], draft_length=own)]
    lengths = tuple(option.draft_length for option in options)
    full = (ceil(length / (below + 1)) for below, length in pairwise(lengths))
    rounds = (0, *(each.max_rounds or n for each, n in zip(options[1:], full, strict=True)))
    forwards = 0 if lookup else lengths[0]
    for k in range(1, len(options)):
        forwards = rounds[k] * (forwards + 1)
        if forwards > MAX_FORWARDS:
            raise UserError(
                f"levels[{k}] takes {forwards} forward passes per draft, above {MAX_FORWARDS}: "
                f"lower levels[{k}].max_rounds or raise levels[{k - 1}].num_tokens."
            )
    # Of the last proposal's draft, which may have been longer.
    replaced = max(lengths[0], longest_drafts[0]) if chooses or drafts > 1 else 1
    ops = _unroll(lengths, rounds, lookup, chooses, replaced, horizontal_tokens)
    if drafts > 1:
        ops = _repeat(ops, drafts)
    longest = max(longest, longest_drafts[1])
    for op in ops:
        if bounded and isinstance(op, Draft | Verify) and op.query_length > longest + 1:
            cause, cure = f"there are {len(options)} levels", "remove one"
            if isinstance(op, Verify):
                cause = f"levels[{op.level - 1}].num_tokens is {op.draft_length}"
                cure = "lower it"
            if horizontal_tokens:
                cause, cure = f"horizontal_tokens is {horizontal_tokens}", "lower it"
            raise UserError(
                f"{cause}, so levels[{op.level}] would compute {op.query_length} tokens at once, "
                f"above num_speculative_tokens + 1 ({longest + 1}), the most that decoding kernels "
                f"take: {cure} or raise num_speculative_tokens."
            )
    window = uncached_bound(0, len(options), replaced) + horizontal_tokens
    return Schedule(ops, lengths, rounds, window, horizontal_tokens, drafts)


def _unroll(
    lengths: Sequence[int],
    rounds: Sequence[int],
    lookup: bool,
    chooses: bool,
    replaced: int,
    horizontal_tokens: int,
) -> tuple[Op, ...]:
    ops: list[Op] = []
    used = [0] * len(lengths)
    # Of the last proposal, which only the lowest level has computed.
    missed = [horizontal_tokens] * len(lengths)

    def draws(level: int, count: int) -> int:
        first, used[level] = used[level], used[level] + count
        return first

    def uncached(level: int) -> int:
        more, missed[level] = missed[level], 0
        return uncached_bound(level, len(lengths), 1 if level else replaced) + more

    def draft(length: int) -> None:
        if lookup or chooses:
            ops.append(Lookup())
        for step in range(0 if lookup else length):
            ops.append(Draft(0, step, uncached(0) if step == 0 else 1, draws(0, 1)))
        if chooses:
            ops.append(Choose())

    def request(level: int) -> None:
        if level == 0:
            return draft(lengths[0])
        below = lengths[level - 1]
        for _ in range(rounds[level]):
            request(level - 1)
            ops.append(Verify(level, uncached(level) + below, below, draws(level, below + 1)))

    request(len(lengths) - 1)
    if horizontal_tokens:
        draft(horizontal_tokens)
    # MAX_FORWARDS * 64 draws are the most, which is far below the bound.
    assert max(used) <= DRAWS_PER_LENGTH
    return tuple(ops)


def _repeat(ops: tuple[Op, ...], drafts: int) -> tuple[Op, ...]:
    """The ops of several drafts from those of one: the first pass is all drafts', the chain's last.

    Then the cache holds the chain.
    """
    first, *later = (op for op in ops if isinstance(op, Draft))
    rows = reversed(range(drafts))
    passes = (replace(op, row=row, draw=row * len(ops) + op.draw) for row in rows for op in later)
    return (first, *passes)
