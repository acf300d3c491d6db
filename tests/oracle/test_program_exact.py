"""Exact distribution of a proposal of the program, verified by the target; every draw enumerated.

The kernels of its steps run, compiled for a CPU; those that draw are replaced by all that they may
draw. Uniforms are fresh in every proposal (tests/host/test_program.py), so that the tokens of one
step, continued by the target, must have the target's joint distribution.
"""

from fractions import Fraction
from functools import partial
from unittest import mock

import pytest
import torch
from oracle import sequential
from oracle.exact import Choices, Table, Tokens, deviation
from support.programs import PROMPT, Engine

from vllm_hsd.budget.trials import Trials
from vllm_hsd.cascade.entropy_stopping import end_unsure_drafts
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.naive import row_thresholds

VOCABULARY = 3
TARGET = Table(VOCABULARY, 1)
VERIFIERS = {"block": sequential.block, "standard": sequential.standard}


def exact_row(logits: torch.Tensor) -> list[Fraction]:
    """The table's fractions, back from float64 logits."""
    return [Fraction(p).limit_denominator(10**6) for p in logits.exp().tolist()]


def proposed(
    rows: torch.Tensor | None, draft: list[int], vocabulary: int, drawn: bool = True
) -> list[list[Fraction]]:
    """What the tokens of a draft were drawn from: the first of [n, V] rows, or point masses."""
    if rows is not None and drawn:
        return [exact_row(row) for row in rows[: len(draft)]]
    return [[Fraction(v == token) for v in range(vocabulary)] for token in draft]


def exact_engine(
    lengths, rounds=(), verifier="block", *, vocabulary=VOCABULARY, **options
) -> Engine:
    """Of one request, with rows in float64, which are those of its tables."""
    options |= {"batch": 1, "requests": 1, "dtype": torch.float64}
    return Engine(lengths, rounds, (verifier,) * 3, vocabulary=vocabulary, **options)


class Chosen:
    """Enumerated choices in place of the kernels' draws, for one request at temperature 1.

    Args:
        engine: whose program runs.
        by_position: choices of a level at one position of the text share a uniform (a fault).
    """

    def __init__(self, engine: Engine, by_position: bool = False) -> None:
        self.engine, self.by_position = engine, by_position
        engine.temperature.fill_(1)
        engine.scales.fill_(1)
        self.prompt = engine.text.clone()
        self.caches = [level.cache.clone() for level in engine.levels]

    def draws(self, **replaced):
        """Enumerate in the place of the kernels that draw, which take no rows in float64."""
        own = {"sample_row": self.sample_row, "verify_chain_padded": self.verify_chain_padded}
        own |= {"row_thresholds": row_thresholds, **replaced}
        return mock.patch.multiple("vllm_hsd.cascade.program", **own)

    def begin(self, choices: Choices) -> None:
        """Begin an outcome: nothing but the prompt is committed and cached."""
        engine, self.choices = self.engine, choices
        engine.text.copy_(self.prompt)
        engine.length[engine.index.long()] = PROMPT
        for level, cache in zip(engine.levels, self.caches, strict=True):
            level.cache.copy_(cache)
        if engine.host:
            engine.program.caches.computed[:] = 0
            engine.program.trials = Trials(1)

    def key(self, *parts):
        return parts if self.by_position else None

    def sample_row(self, logits, temperature, seeds, draws, *, level, draw_offset, **_):
        state = self.engine.state
        if not state.drafted[0, 0] < state.requested[0, 0]:
            return torch.zeros(1, dtype=torch.int64), torch.zeros(1)
        position = int(state.base[0] + state.end[0])
        token = self.choices.sample(exact_row(logits[0]), self.key(0, "draft", position))
        return torch.tensor([token]), torch.zeros(1)

    def verify_chain_padded(
        self, target_logits, draft_logits, sampled, cu, index, *_, method, level, **given
    ):
        state = self.engine.state
        n = int(given["draft_length"][0])
        width = given["max_draft_tokens"] + 1
        accepted, token = 0, 0
        if state.origin[0] >= 0:
            draft = sampled[1 : n + 1].tolist()
            accepted, token = self.verify(
                [exact_row(row) for row in target_logits[: n + 1]],
                proposed(
                    None if draft_logits is None else draft_logits[0],
                    draft,
                    target_logits.shape[1],
                    float(given["draft_temperature"][0]) > 0,
                ),
                draft,
                VERIFIERS[method],
                level,
                int(state.base[0] + state.start[level - 1, 0]),
            )
        tokens = torch.full((1, width), -1)
        tokens[0, :accepted] = sampled[1 : accepted + 1]
        tokens[0, accepted] = token
        counts = torch.tensor([accepted], dtype=torch.int32)
        return ChainResult(tokens, counts, counts + 1, torch.zeros(1, width))

    def target_step(
        self, target: Table, draft: list[int], verifier: str, text: Tokens = (), drawn=True
    ) -> tuple[int, int]:
        """How much of the engine's draft after `text` the target accepts, and its next token.

        Args:
            drawn: whether tokens are verified with the rows that the program has kept, if any.
        """
        rows = self.engine.state.rows[-1]
        return self.verify(
            target.rows((*draft,), len(draft) + 1, text),
            proposed(None if rows is None else rows[0], draft, target.vocabulary, drawn),
            draft,
            VERIFIERS[verifier],
            self.engine.schedule.num_levels,
            PROMPT + len(text),
        )

    def verify(self, p, q, x, rule, level, first):
        place = iter(range(first, first + len(x)))
        return rule(
            p,
            q,
            x,
            lambda h: self.choices.bernoulli(h, self.key(level, "accept", next(place))),
            lambda weights: self.choices.sample(weights, self.key(level, "next", first)),
        )


def bias(
    lengths,
    rounds=(),
    verifier="block",
    *,
    by_position=False,
    mutate=None,
    functions=(),
    **settings,
) -> Fraction:
    """Total variation distance of the next three tokens to the target's joint distribution.

    Args:
        mutate: changes a proposal's state before it is verified.
        functions: steps to replace by name, each called with the one that it replaces.
        settings: of the engine; drafts that end by entropy do as if a token had been rejected at
            0.8 nats.
    """
    engine = exact_engine(lengths, rounds, verifier, **settings)
    chosen = Chosen(engine, by_position)

    def one_step(choices: Choices) -> Tokens:
        chosen.begin(choices)
        if engine.thresholds is not None:
            engine.thresholds.total.fill_(0.8)
            engine.thresholds.count.fill_(1)
        [draft] = engine.propose()
        if mutate is not None:
            mutate(engine.state, len(draft))
        accepted, token = chosen.target_step(TARGET, draft, verifier)
        return (*draft[:accepted], token)

    own = {"sample_row": chosen.sample_row, "end_unsure_drafts": end_unsure_drafts}
    replaced = {name: partial(wrap, own[name]) for name, wrap in dict(functions).items()}
    with chosen.draws(**replaced):
        return deviation(one_step, TARGET, 3)


ENTROPY = {"stopping": ("entropy",) * 3}


@pytest.mark.parametrize(
    ("lengths", "rounds", "verifier", "settings"),
    [
        ((2,), (), "block", {}),
        ((1, 3), (), "block", {}),
        ((1, 2, 3), (1, 1), "block", {}),
        ((3,), (), "block", ENTROPY),
        ((2, 3), (2,), "block", ENTROPY),
        ((2, 3), (2,), "standard", {"stopping": ("fixed", "entropy")}),
        ((1, 3), (), "block", {"horizontal_tokens": 1}),
        ((1, 3), (), "block", ENTROPY | {"horizontal_tokens": 1}),
        *(
            (*case, settings)
            for case in (((1, 2, 3), (1, 2), "block"), ((1, 2, 3), (2, 1), "standard"))
            for settings in ({}, ENTROPY)
        ),
        *(((2, 3), (2,), v, {}) for v in VERIFIERS),
    ],
)
def test_a_step_has_the_distribution_of_the_target(lengths, rounds, verifier, settings):
    assert bias(lengths, rounds, verifier, **settings) == 0


def test_uniforms_keyed_by_position_are_caught():
    """Rounds meet positions again whose uniforms block verification has looked at."""
    assert bias((2, 3), (2,), by_position=True) > Fraction(1, 1000)


def test_rows_that_the_tokens_were_not_drawn_from_are_caught():
    def rows_of_level_zero(state, count):
        state.rows[1][0, :1] = state.rows[0][0, :1]

    assert bias((1, 3), mutate=rows_of_level_zero) > Fraction(1, 1000)


def test_horizontal_tokens_with_rows_of_the_top_level_are_caught():
    def repeat(state, count):
        state.rows[1][0, count - 1] = state.rows[1][0, count - 2]

    assert bias((1, 3), horizontal_tokens=1, mutate=repeat) > Fraction(1, 1000)


def test_dropping_a_token_that_was_looked_at_is_caught():
    """A draft may not end before an unlikely token because it is unlikely."""
    drawn = []

    def sample_row(original, logits, *args, **rest):
        token, lse = original(logits, *args, **rest)
        drawn.append(float(logits[0, token[0]].exp()))
        return token, lse

    def drop(original, thresholds, state, op, logits, result=None):
        if result is None and drawn[-1] < 0.4 and op.step < state.requested[0, 0]:
            state.requested[0, 0] = op.step

    functions = {"sample_row": sample_row, "end_unsure_drafts": drop}
    assert bias((2,), **ENTROPY, functions=functions) > Fraction(1, 1000)


def test_dropping_the_token_of_an_unsure_verification_is_caught():
    def drop(original, thresholds, state, op, logits, result=None):
        before = state.requested.clone()
        original(thresholds, state, op, logits, result)
        if result is not None and not state.requested.equal(before):
            result.num_emitted.copy_(result.num_accepted)

    functions = {"end_unsure_drafts": drop}
    assert bias((2, 3), (2,), **ENTROPY, functions=functions) > Fraction(1, 1000)
