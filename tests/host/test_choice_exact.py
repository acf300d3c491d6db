"""Exact distribution of steps whose drafts are a lookup's or a model's, whichever is chosen.

Two steps, so that the second choice goes by what became of the first one, or one of two rounds. The
past also decides which passes the model runs, and which levels a CPU runs.
"""

import copy
import zlib
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from oracle.exact import Choices, Table, Tokens, deviation
from oracle.test_program_exact import Chosen, exact_engine
from support.programs import MAX_NUM_REQS

from vllm_hsd.budget.source_choice import Estimates, SourcesLookup
from vllm_hsd.cascade.level import StepLevels
from vllm_hsd.cascade.program import ProgramSources

VOCABULARY = 2
TARGET = Table(VOCABULARY, 1)


def last_again(state, text):
    """A lookup: the last token again, as often as may be."""
    count, end = int(state.requested[0, 0]), int(state.end[0])
    state.window[0, end : end + count] = state.window[0, end - 1]
    state.end[0] += count
    state.drafted[0, 0] = count


def of_place(state, *, drafts: bool) -> tuple:
    """What a rule may look at, and with `drafts` what it may not: what the model has drawn."""
    start = int(state.end[0]) - int(state.drafted[0, 0])
    end = int(state.end[0]) if drafts else start
    return int(state.base[0]), state.window[0, :end].tolist()


def choosing(rule: str):
    """`SourcesLookup` with a lookup and a model, which are chosen by a rule."""

    class ByHash(SourcesLookup):
        """Any function of the past; "drawn" sees the draft too, and for "cut" the model drafts."""

        def choose(self, state):
            if int(state.requested[0, 0]) > 0 and rule != "learned":
                seen = of_place(state, drafts=rule == "drawn"), self.own.tolist()
                wins = 1 if rule == "cut" else zlib.crc32(repr(seen).encode()) % 2
                # Nothing that was expected has become of the other one.
                self.own[:, :, int(state.slot[0])] = 0.0
                self.own[0, 1 - wins, int(state.slot[0])] = -float(self.prior)
            super().choose(state)
            if rule == "rows":
                self.drawn.fill_(1.0)

        def prefers_drafter(self, state):
            past = of_place(state, drafts=False), self.counts.tolist(), self.own.tolist()
            return torch.tensor([(zlib.crc32(repr(past).encode()) >> 9) % 3 > 0])

    estimates = Estimates(torch.full((9,), 0.7, dtype=torch.float64), by_token=False)
    cpu = torch.device("cpu")
    return ByHash([(last_again, estimates)], 0.05, MAX_NUM_REQS, 2, cpu, has_drafter=True)


# Of a model next to lookups: it drafts where it is preferred alone.
NO_TRIALS = SimpleNamespace(pays=lambda option: None, due=lambda option: False)
# Levels that draft in a step of two levels.
SELECTIONS = [
    StepLevels((0, 1), (1, 2)),
    StepLevels((0,), (1,)),
    StepLevels((1,), (2,)),
    StepLevels(),
]


def bias(
    rule: str, lengths=(2,), verifier="block", steps=2, host=False
) -> tuple[Fraction, set[tuple]]:
    """Total variation distance to the target's joint distribution, and which sources drafted."""
    found = choosing(rule)
    found.length = lengths[0]

    def offer(state):
        found.offer(state, engine.text)

    of_drafter = found.prefers_drafter, found.drafter_selected
    sources = ProgramSources(offer, found.choose, found.drawn, *of_drafter)
    kind = {"vocabulary": VOCABULARY, "sources": sources, "host": host}
    engine = exact_engine(lengths, verifier=verifier, **kind)
    chosen, kept = Chosen(engine), set()
    slot = int(engine.index[0])
    whole, fewer = engine.program, copy.copy(engine.program)
    fewer.schedule = whole.schedule.with_first_passes()

    def generate(choices: Choices) -> Tokens:
        chosen.begin(choices)
        found.shared.zero_()
        found.forget(torch.tensor([slot]))
        if host:
            whole.trials = NO_TRIALS
        text: Tokens = ()
        for _ in range(steps):
            past = zlib.crc32(repr((text, found.own.tolist())).encode())
            skips = rule != "cut" and bool(past % 2)
            selection = SELECTIONS[past // 2 % 4] if host and len(lengths) > 1 else None
            engine.program = fewer if skips and not host else whole
            [draft] = engine.propose(selection)
            if rule == "cut" and draft[1:] == [0]:
                # The pass for a token is skipped when it is known.
                draft = draft[:1]
            drawn = len(lengths) > 1 or bool(found.drawn[slot] > 0)
            if draft:
                kept.add((skips, float(found.drawn[slot])))
            accepted, token = chosen.target_step(TARGET, draft, verifier, text, drawn)
            engine.commit(0, [*draft[:accepted], token])
            text = (*text, *draft[:accepted], token)
        return text

    with chosen.draws():
        return deviation(generate, TARGET, 4), kept


@pytest.mark.parametrize(
    ("rule", "lengths", "verifier", "steps", "host"),
    [
        ("any", (2,), "standard", 2, False),
        ("learned", (2,), "block", 2, False),
        ("any", (2,), "block", 2, False),
        ("any", (1, 2), "block", 2, False),
        ("any", (1, 3), "block", 1, False),
        ("any", (1, 2), "block", 2, True),
        ("any", (2,), "standard", 2, True),
        ("any", (2,), "block", 2, True),
    ],
)
def test_a_choice_by_the_past_has_the_distribution_of_the_target(
    rule, lengths, verifier, steps, host
):
    """Also where the host decides which passes and levels run."""
    found, kept = bias(rule, lengths, verifier, steps, host)
    assert found == 0
    assert rule == "learned" or len({drawn for _, drawn in kept}) == 2
    assert host or lengths[0] == 1 or len({skips for skips, _ in kept}) == 2


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("rule", ["drawn", "rows", "cut"])
def test_a_choice_by_the_drawn_token_and_wrong_rows_are_caught(rule, host):
    """Negative controls: it or a draft's length looks at the draft; lookups count as drawn."""
    assert bias(rule, steps=1, host=host)[0] > Fraction(1, 1000)
