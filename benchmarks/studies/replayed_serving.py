"""Greedy serving of recorded answers, at given times: no model runs.

Greedy drafts are accepted while they equal the answer, lookups search the text itself, and time is
a sum over passes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile

import numpy as np

from vllm_hsd.budget.draft_budget import DraftBudget
from vllm_hsd.budget.step_times import TIMED_AT_START
from vllm_hsd.cascade.level import DraftingLevel, LookupResult, of_each_token
from vllm_hsd.tools.lookup_level import Texts
from vllm_hsd.tools.planner.suffix_level import SuffixLevel

LENGTH = 8  # most tokens of a draft
# Levels, 0 the lookup and 1 the small model, and draft lengths.
Fixed = tuple[tuple[int, ...], tuple[int, ...]]
SLOT = np.zeros(1, dtype=np.int64)


@dataclass(frozen=True)
class Times:
    """Seconds of passes by tokens, as traced on a core of an AMD EPYC (family 26), bfloat16.

    Attributes:
        target: a pass over one token; slope: what each further one adds, as a share.
        small: a pass of the 0.5B over one token; read: over each token of a prompt.
        search: a lookup; each: of every further request at the same time.
    """

    target: float = 0.122
    slope: float = 0.06
    small: float = 0.040
    read: float = 0.002
    search: float = 0.001
    each: float = 0.00004

    def verify(self, tokens: int) -> float:
        """A pass of the target."""
        return self.target * (1 + self.slope * (tokens - 1))

    def draft(self, tokens: int) -> float:
        """A pass of the 0.5B."""
        return self.small + self.read * (tokens - 1)

    def look_up(self, requests: int) -> float:
        """A search for so many requests."""
        return self.search + self.each * (requests - 1)


@dataclass(frozen=True, eq=False)
class Answer:
    """A recorded answer.

    Attributes:
        set: of its prompt.
        prompt, tokens: ids.
        small: the small model's likeliest token at each place of the answer.
        sure: its probability.
    """

    set: str
    prompt: list[int]
    tokens: list[int]
    small: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)


@cache
def _offer(answer: Answer, added: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """A suffix lookup after the prompt and some tokens: what it drafts, and its estimates."""
    level, text = SuffixLevel(), np.array([[*answer.prompt, *added]], dtype=np.int32)
    level.committed = {0: text.shape[1]}
    found = level.lookup(Texts(text, SLOT, SLOT, SLOT + text.shape[1]), SLOT + LENGTH)
    count = int(found.counts[0])
    return found.token_ids[0, :count].tolist(), of_each_token(found.confidence)[0, :count].tolist()


@dataclass
class Request:
    """An answer that is being given.

    Attributes:
        answer: what it will be.
        slot: of the budget.
        place: tokens that it has.
        read: tokens of prompt and answer that the 0.5B has read.
        room: most tokens of its next draft.
        draft: tokens that the target is to verify.
        sure: what their drafter says of each.
        right: whether all tokens of the draft are the answer's.
    """

    answer: Answer
    slot: int
    place: int = 1
    read: int = 0
    room: int = 0
    draft: list[int] = field(default_factory=list)
    sure: list[float] = field(default_factory=list)
    right: bool = True

    @property
    def left(self) -> int:
        """Tokens that are still to come."""
        return len(self.answer.tokens) - self.place

    @property
    def missed(self) -> int:
        """Tokens that the 0.5B has to read before it drafts."""
        return len(self.answer.prompt) + self.place - 1 - self.read

    def look_up(self) -> tuple[list[int], list[float]]:
        """What a lookup drafts after the draft."""
        return _offer(self.answer, (*self.answer.tokens[: self.place], *self.draft))

    def verify(self, offered: Sequence[int]) -> int:
        """Append what the 0.5B keeps of a lookup's draft and its own token; how much it keeps."""
        for kept, token in enumerate([*offered, None]):
            at = self.place + len(self.draft)
            # What it says after a wrong token is not recorded: nothing that is accepted.
            known = self.right and at < len(self.answer.tokens)
            own = self.answer.small[at] if known else -1
            self.draft.append(own)
            self.sure.append(self.answer.sure[at] if known else 0.6)
            self.right = known and own == self.answer.tokens[at]
            if token is None or token != own:
                return kept
        raise AssertionError

    def accepted(self) -> int:
        """Tokens of the draft that the target accepts."""
        pairs = zip(self.draft, self.answer.tokens[self.place :], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Server:
    """Some streams of one request after another, by a fixed configuration or by the budget.

    Args:
        fixed: levels and draft lengths; None for the budget, which has seen nothing yet.
        streams: requests at the same time.
        drafts: whether the budget has a small model above its lookup.
    """

    def __init__(
        self, times: Times, fixed: Fixed | None, streams: int = 1, drafts: bool = True
    ) -> None:
        self.times, self.fixed, self.streams, self.seconds = times, fixed, streams, 0.0
        self.budget = None
        if fixed is None:
            levels = [DraftingLevel(LENGTH, LENGTH, looks_up=True)]
            levels += [DraftingLevel(LENGTH, LENGTH, verifies=True, ends=True)] * drafts
            self.budget = DraftBudget(levels, streams)
            # A server times its levels when it starts.
            for tokens in TIMED_AT_START * drafts:
                self.budget.times[1].observe(tokens, times.draft(tokens))

    def answer(self, answers: Iterable[Answer]) -> float:
        """Seconds of answers after their first tokens."""
        began, waiting = self.seconds, iter(answers)
        running: dict[int, Request] = {}
        while True:
            for slot in set(range(self.streams)) - set(running):
                if (answer := next(waiting, None)) is None:
                    break
                running[slot] = Request(answer, slot)
                if self.budget is not None:
                    self.budget.forget(slot)
            if not running:
                return self.seconds - began
            self._step(list(running.values()))
            running = {slot: each for slot, each in running.items() if each.left > 0}

    def _step(self, requests: list[Request]) -> None:
        began, budget = self.seconds, self.budget
        for each in requests:
            # With `adaptive` the first token does not wait for a model.
            each.room = 0 if budget is not None and each.place == 1 else min(LENGTH, each.left - 1)
            each.draft, each.sure, each.right = [], [], True
        candidates = [each for each in requests if each.room]
        levels, lengths = self._select(candidates, len(requests))
        asked = [each.room if levels else 0 for each in candidates]
        drafting = [each for each in candidates if each.room]
        if levels == (0,):
            if budget is None:
                self.seconds += self.times.look_up(len(drafting))
            for each in drafting:
                tokens, sure = each.look_up()
                each.draft, each.sure = tokens[: each.room], sure[: each.room]
        elif levels:
            self._cascade(drafting, lengths[0] if 0 in levels else 0, len(requests))
        accepted = np.array([each.accepted() for each in requests])
        fed = sum(1 + len(each.draft) for each in requests)
        if budget is not None:
            self._learn(requests, candidates, levels, asked, accepted, self.seconds - began)
            budget.times[-1].observe(fed, self.times.verify(fed))
        self.seconds += self.times.verify(fed)
        for each, more in zip(requests, accepted.tolist(), strict=True):
            if 1 in levels and each.draft:
                kept = min(more, len(each.draft) - 1)
                each.read = len(each.answer.prompt) + each.place + kept
            each.place += more + 1

    def _select(
        self, drafting: list[Request], running: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Levels and draft lengths; limits the drafts of all requests."""
        if self.budget is None:
            assert self.fixed is not None
            levels, lengths = self.fixed
            for each in drafting:
                each.room = min(each.room, lengths[-1]) if levels else 0
            return levels, lengths
        times, count = self.budget.times, len(drafting)
        if not drafting or not self.budget.searches_for(count):
            return (), ()
        searching = self.times.look_up(count)
        self.seconds += searching
        slots, most = _array(drafting, "slot"), _array(drafting, "room")
        offers = [each.look_up()[1][: each.room] for each in drafting]
        counts = np.array([len(offer) for offer in offers])
        confidence = np.cumprod(_padded(offers, max(counts.max(), 1)), axis=1)
        offer = LookupResult(np.zeros(confidence.shape, np.int64), counts, confidence)
        missed = np.maximum(_array(drafting, "missed"), 0)
        late = np.zeros((self.budget.target, count))
        if len(late) > 1 and missed.any():
            late[1] = times[1].seconds(missed.sum()) * missed / missed.sum()
        plan = self.budget.plan(slots, most, running, offer, late, _array(drafting, "left"))
        self.budget.searched(count, running, searching, plan.gained)
        self.prices, selected = plan.further, plan.selection
        if not selected.levels:
            return (), ()
        most = np.minimum(most if selected.most is None else selected.most, most)
        for each, room in zip(drafting, most.tolist(), strict=True):
            each.room = min(room, selected.draft_lengths[-1])
        return selected.levels, selected.draft_lengths

    def _cascade(self, drafting: list[Request], length: int, running: int) -> None:
        """Drafts of the 0.5B, with lookups below it of so many tokens or without.

        Its passes are over all requests that run.
        """
        budget = self.budget
        if late := sum(each.missed - 1 for each in drafting if each.missed > 1):
            self._pass(late)
        first = True
        while going := [each for each in drafting if len(each.draft) < each.room]:
            began, offers, asked = self.seconds, [], []
            for each in going:
                asked.append(min(length, each.room - len(each.draft) - 1) if length else 0)
                tokens, sure = each.look_up() if asked[-1] else ([], [])
                offers.append((tokens[: asked[-1]], sure[: asked[-1]]))
            # The budget has seen what lookups offer first.
            if any(asked) and not (first and budget is not None):
                self.seconds += self.times.look_up(sum(map(bool, asked)))
            first, drafted = False, np.array([len(tokens) for tokens, _ in offers])
            looked = self.seconds
            fed = running * (1 + int(drafted.max()))
            self._pass(fed, observe=not length)
            accepted = [
                each.verify(tokens) for each, (tokens, _) in zip(going, offers, strict=True)
            ]
            if budget is None:
                continue
            slots = _array(going, "slot")
            if length:
                budget.level_verified(
                    0,
                    1,
                    slots,
                    requested=np.array(asked),
                    drafted=drafted,
                    estimates=_padded([sure for _, sure in offers], LENGTH, np.nan),
                    accepted=np.array(accepted),
                    computed=fed,
                    drafting_seconds=looked - began,
                    verifying_seconds=self.seconds - looked,
                )
            counts = np.array([len(each.draft) for each in going])
            known = _padded([each.sure for each in going], max(LENGTH, int(counts.max())))
            more = budget.goes_on(1, slots, known, counts, self.prices)
            for each, goes_on in zip(going, more.tolist(), strict=True):
                each.room = each.room if goes_on else min(each.room, len(each.draft))
        for each in drafting:
            each.draft, each.sure = each.draft[: each.room], each.sure[: each.room]

    def _pass(self, tokens: int, observe: bool = True) -> None:
        seconds = self.times.draft(tokens)
        self.seconds += seconds
        if observe and self.budget is not None:
            self.budget.times[1].observe(tokens, seconds)

    def _learn(
        self,
        requests: list[Request],
        candidates: list[Request],
        levels: tuple[int, ...],
        asked: list[int],
        accepted: np.ndarray,
        seconds: float,
    ) -> None:
        """The target has verified what `seconds` of drafting gave, `asked` tokens of candidates."""
        budget, slots = self.budget, _array(requests, "slot")
        assert budget is not None
        top = levels[-1] if levels else 0
        drafted = np.array([len(each.draft) for each in requests])
        counts = np.array([len(each.draft) for each in candidates], dtype=np.int64)
        wanted = np.array(asked, dtype=np.int64)
        budget.drafted_for_target(top, _array(candidates, "slot"), wanted, counts, seconds)
        told = drafted > 0
        estimates = _padded([each.sure for each in requests], LENGTH, np.nan)[told]
        budget.learn_acceptance(
            top, budget.target, slots[told], drafted[told], estimates, accepted[told]
        )
        budget.step_ended(slots, drafted, accepted)


def _array(requests: list[Request], name: str) -> np.ndarray:
    return np.array([getattr(each, name) for each in requests], dtype=np.int64)


def _padded(rows: list[list[float]], width: int, value: float = 0.0) -> np.ndarray:
    found = np.full((len(rows), width), value)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found
