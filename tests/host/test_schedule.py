"""The fixed schedule: its ops, its bounds, and the catch-up rule by exhaustion."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from support.proposal_states import schedule_of

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.schedule import (
    DRAWS_PER_LENGTH,
    Choose,
    Draft,
    Lookup,
    Schedule,
    Verify,
    compile_schedule,
    first_draw,
)
from vllm_hsd.errors import UserError


@pytest.mark.parametrize(
    ("lengths", "rounds"), [((4,), ()), ((3, 8), (5,)), ((1, 3, 7), (2, 4)), ((2, 2, 2, 9), ())]
)
def test_every_draw_of_a_stream_is_used_once(lengths, rounds):
    """Within a proposal by offsets, between proposals by the length of the text."""
    schedule = schedule_of(*lengths, rounds=rounds)
    used = set()
    for length in (1, 2, 3, 2**31 - 1):
        for op in schedule.ops:
            first = first_draw(length) + op.draw
            for draw in range(first, first + schedule.num_logits(op)):
                assert (op.level, draw) not in used
                assert first_draw(length) <= draw < first_draw(length + 1) < 2**63
                used.add((op.level, draw))
    assert schedule.num_speculative_tokens + 1 <= DRAWS_PER_LENGTH


LOW, HOT = LevelOptions(3), LevelOptions(8, temperature_scale=2.0)


@pytest.mark.parametrize(
    ("options", "settings", "key"),
    [
        ([LOW, LevelOptions(8)], {"horizontal_tokens": 5}, "horizontal_tokens is 5"),
        ([LOW, HOT], {"horizontal_tokens": 2}, r"needs the temperature_scale of levels\[1\]"),
        ([LOW, replace(HOT, verifier="none")], {}, r'levels\[1\].verifier is "none"'),
        ([LOW, LOW], {}, r"levels\[0\].num_tokens is 3, so levels\[1\]"),
        ([LevelOptions(1), LevelOptions(1), LevelOptions(2)], {}, "there are 3 levels"),
        ([LOW, LevelOptions(8)], {"chooses": True, "horizontal_tokens": 1}, "has a model, with"),
        ([replace(LOW, stopping="entropy")], {"chooses": True}, "neither stopping nor horizontal"),
        (
            [LevelOptions(1), LevelOptions(10), LevelOptions(40, max_rounds=12)],
            {},
            r"lower levels\[2\].max_rounds",
        ),
    ],
)
def test_what_a_fixed_schedule_cannot_do_is_refused(options, settings, key):
    with pytest.raises(UserError, match=key):
        compile_schedule(options, **settings)


class Hole(Exception):
    """A forward pass would attend to a position that its level has not computed."""


class Request:
    """Which token every level has computed at which position, while a schedule runs.

    Tokens are numbers that never repeat, so an entry of a rejected token is never taken for valid.

    Args:
        schedule: what runs.
        shortened: tokens by which the first passes of rounds are shorter than the rule says.
        feed_full: whether requests are fed whose own level has no room, as the rule says.
    """

    def __init__(self, schedule: Schedule, shortened: int = 0, feed_full: bool = True) -> None:
        self.schedule, self.shortened, self.feed_full = schedule, shortened, feed_full
        self.fresh = count()
        self.chooses = any(isinstance(op, Choose) for op in schedule.ops)

    def begin(self, missing: tuple[frozenset[int], ...]):
        """A text whose level k has not computed the positions missing[k], counted from the end."""
        n = self.schedule.window + 2
        self.text = [next(self.fresh) for _ in range(n)]
        self.computed = [
            {p: t for p, t in enumerate(self.text) if n - p not in holes} for holes in missing
        ]
        self.committed = n
        self.limit = n + self.schedule.num_speculative_tokens - 2
        self.start, self.drafted, self.requested = ([0] * len(missing) for _ in range(3))
        self.requested[-1] = self.schedule.draft_lengths[-1]
        self.ask_below(self.schedule.num_levels - 1)

    def ask_below(self, level: int) -> None:
        for k in range(level - 1, -1, -1):
            room = max(self.requested[k + 1] - self.drafted[k + 1] - 1, 0)
            self.requested[k] = min(self.schedule.draft_lengths[k], room)
            self.start[k], self.drafted[k] = len(self.text), 0

    def feed(self, op) -> None:
        end = len(self.text)
        if isinstance(op, Verify):
            end = self.start[op.level - 1] + op.draft_length
        has_room = self.drafted[op.level] < self.requested[op.level]
        if self.drafted[-1] == self.requested[-1] or not (has_room or self.feed_full):
            return
        padded = self.text + [-1] * (end - len(self.text))
        mine = self.computed[op.level]
        for p in range(end - op.query_length + self.shortened * (op.query_length > 1), end):
            if p <= self.limit:
                mine[p] = padded[p]
        # A level that passes nothing on may lack some of the text; others have computed all of it.
        # Only the last token of a proposal is past the limit, and nothing is drawn after it.
        if has_room and any(mine.get(p) != t for p, t in enumerate(self.text)):
            raise Hole(op)

    def copied(self) -> "Request":
        other = copy.copy(self)
        other.text, other.computed = list(self.text), [dict(level) for level in self.computed]
        other.start, other.drafted = list(self.start), list(self.drafted)
        other.requested = list(self.requested)
        return other

    def outcomes(self, at: int = 0) -> Iterator["Request"]:
        """What it is after the ops from `at` on, along every outcome."""
        if at == self.schedule.tail < len(self.schedule.ops):
            self.start[0], self.drafted[0] = len(self.text), 0
            self.requested[0] = self.schedule.horizontal_tokens if self.drafted[-1] else 0
            self.requested[-1] = self.drafted[-1] + self.requested[0]
        if at == len(self.schedule.ops):
            if self.schedule.horizontal_tokens:
                self.drafted[-1] += self.drafted[0]
            yield self
            return
        op = self.schedule.ops[at]
        k = op.level if isinstance(op, Verify) else 0
        if not isinstance(op, Lookup | Choose):
            self.feed(op)
        if isinstance(op, Verify):
            drafted = self.drafted[k - 1]
            choices = range(drafted + 1) if self.drafted[k] < self.requested[k] else [None]
        elif isinstance(op, Choose):
            # The draft stays, or an offer of any length takes its place.
            choices = [None, *range(self.requested[0] + 1)]
        elif isinstance(op, Lookup):
            choices = [0] if self.chooses else range(self.requested[0] + 1)
        else:
            choices = [int(self.drafted[0] < self.requested[0])]
        for choice in choices:
            after = self.copied()
            if isinstance(op, Verify):
                if choice is not None:
                    del after.text[after.start[k - 1] + choice :]
                    after.text.append(next(self.fresh))
                    after.drafted[k] += choice + 1
                after.ask_below(k)
            elif choice is not None:
                if isinstance(op, Choose):
                    del after.text[after.start[0] :]
                    after.drafted[0] = 0
                after.text += [next(self.fresh) for _ in range(choice)]
                after.drafted[0] += choice
            yield from after.outcomes(at + 1)

    def missing_after(self, accepted: int) -> tuple[frozenset[int], ...]:
        """What every level lacks once the target kept so many draft tokens and added its own."""
        text = [*self.text[: self.committed + accepted], next(self.fresh)]
        return tuple(
            frozenset(len(text) - p for p, t in enumerate(text) if mine.get(p) != t)
            for mine in self.computed
        )


def reachable(*requests: Request) -> set[tuple[frozenset[int], ...]]:
    """States of the caches between proposals, each any of these, from a text just ingested."""
    start = tuple(frozenset({1}) for _ in requests[0].schedule.draft_lengths)
    found, todo = {start}, [(start, request) for request in requests]
    while todo:
        missing, request = todo.pop()
        request.begin(missing)
        for end in request.outcomes():
            for accepted in range(end.drafted[-1] + 1):
                after = end.missing_after(accepted)
                if after not in found:
                    found.add(after)
                    todo += [(after, each) for each in requests]
    return found


@pytest.mark.parametrize(
    ("lengths", "rounds", "lookup", "horizontal"),
    [
        ((4,), (), False, 0),
        ((2, 4), (), False, 0),
        ((2, 4), (3,), False, 0),
        ((1, 4), (1,), False, 0),
        ((2, 4), (2,), True, 0),
        ((1, 2, 4), (1, 2), False, 0),
        ((1, 2, 4), (2, 2), False, 0),
        ((1, 2, 4), (1, 2), True, 0),
        ((3, 8), (), False, 0),
        ((2, 3, 7), (2, 3), False, 0),
        ((2, 6), (), False, 2),
        ((2, 5), (), True, 1),
        ((1, 6), (2,), False, 3),
        ((1, 2, 7), (1, 2), False, 2),
    ],
)
def test_catch_up_leaves_no_hole(lengths, rounds, lookup, horizontal):
    """All outcomes of all verifications, until no new state of the caches appears."""
    schedule = schedule_of(*lengths, rounds=rounds, lookup=lookup, horizontal_tokens=horizontal)
    for missing in reachable(Request(schedule)):
        for k, holes in enumerate(missing):
            if not (lookup and k == 0):
                assert max(holes) <= schedule.num_levels - k + 1 + horizontal


@pytest.mark.parametrize(("lengths", "rounds"), [((3,), ()), ((2, 4), (2,)), ((1, 2, 4), (1, 2))])
def test_a_model_next_to_lookups_catches_up(lengths, rounds):
    """By all passes of its drafts, the first ones alone, or both in turn; not without any."""
    schedule = schedule_of(*lengths, rounds=rounds, chooses=True)
    fewer, none = (
        replace(schedule, ops=tuple(op for op in schedule.ops if runs(op)))
        for runs in (lambda op: getattr(op, "step", 0) == 0, lambda op: not isinstance(op, Draft))
    )
    assert schedule.with_first_passes() == fewer
    assert fewer.passes[0] * lengths[0] == schedule.passes[0]
    whole = Request(schedule)
    for missing in reachable(whole, Request(fewer)):
        for k, holes in enumerate(missing):
            assert max(holes) <= schedule.num_levels - k + (1 if k else lengths[0])
    for fault in ({"schedule": schedule, "shortened": 1}, {"schedule": none}):
        with pytest.raises(Hole):
            reachable(whole, Request(**fault))


@pytest.mark.parametrize(("longer", "shorter"), [((4,), (2,)), ((2, 4), (1, 2))])
def test_a_model_next_to_lookups_catches_up_after_longer_drafts(longer, shorter):
    """As `adaptive` has it; not by what a schedule of shorter drafts alone would read."""
    whole = Request(schedule_of(*longer, chooses=True))
    most = longer[0], longer[-1]
    reachable(whole, Request(schedule_of(*shorter, chooses=True, longest_drafts=most)))
    with pytest.raises(Hole):
        reachable(whole, Request(schedule_of(*shorter, chooses=True)))


@pytest.mark.parametrize(
    ("fault", "lengths"),
    [({"shortened": 1}, (4,)), ({"shortened": 1}, (2, 4)), ({"feed_full": False}, (2, 4))],
)
def test_without_the_rule_there_are_holes(fault, lengths):
    with pytest.raises(Hole):
        reachable(Request(schedule_of(*lengths), **fault))


def test_without_longer_first_passes_horizontal_tokens_leave_holes():
    schedule = schedule_of(2, 6, horizontal_tokens=2)
    ops = tuple(
        replace(op, query_length=op.query_length - 1) if isinstance(op, Verify) else op
        for op in schedule.ops
    )
    with pytest.raises(Hole):
        reachable(Request(replace(schedule, ops=ops)))
