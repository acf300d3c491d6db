"""Exact distribution of cascades, in fractions: levels that verify each other below a target."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import pytest
from oracle import sequential
from oracle.exact import (
    Choices,
    Distribution,
    Table,
    Tokens,
    distance,
    distribution_of,
    extended,
    then,
)

VERIFIERS = [sequential.block, sequential.standard]
Buffer = tuple[tuple[int, int], ...]  # (token, level whose row it was drawn from)


@dataclass
class Cascade:
    """Level 0 draws num_tokens; level k >= 1 verifies the one below ``rounds`` times per call.

    ``tail`` unverified tokens of level 0 follow the top level's buffer. The hooks are where the
    faulty variants differ: which level's rows a token is said to have, and what a level keeps.
    """

    models: list[Table]
    verifiers: list[Callable]  # of level 1, level 2, .., target
    num_tokens: int = 2
    rounds: int = 1
    tail: int = 0
    said_level: Callable[[int, int], int] = lambda level, top: level
    kept: Callable[[Tokens, int], Tokens] = lambda x, y: (*x, y)

    def buffer(self, level: int, prefix: Tokens) -> Distribution:
        """The distribution of what a level passes up."""
        if level == 0:
            return self._drawn(prefix, self.num_tokens)
        distribution: Distribution = {(): Fraction(1)}
        for _ in range(self.rounds):
            distribution = then(
                distribution,
                lambda got, c: (got, pick(self.buffer(level - 1, prefix + ids(got)), c)),
            )
            distribution = then(
                distribution, lambda pair, c: pair[0] + self._verified(level, prefix, *pair, c)
            )
        return distribution

    def emitted(self, target: Table) -> Distribution:
        """The distribution of the tokens of one target call."""
        top = len(self.models) - 1
        distribution = self.buffer(top, ())
        distribution = then(
            distribution, lambda got, c: got + pick(self._drawn(ids(got), self.tail), c)
        )

        def verify(got: Buffer, choices: Choices) -> Tokens:
            x = ids(got)
            told = [self.models[self.said_level(k, top)](x[:t]) for t, (_, k) in enumerate(got)]
            tau, y = self.verifiers[top](
                target.rows(x, len(x) + 1), told, x, choices.bernoulli, choices.sample
            )
            return (*x[:tau], y)

        return then(distribution, verify)

    def _drawn(self, prefix: Tokens, count: int) -> Distribution:
        def program(choices: Choices) -> Buffer:
            got: Buffer = ()
            for _ in range(count):
                got += ((choices.sample(self.models[0](prefix + ids(got))), 0),)
            return got

        return distribution_of(program)

    def _verified(
        self, level: int, prefix: Tokens, got: Buffer, offered: Buffer, choices: Choices
    ) -> Buffer:
        start, x = prefix + ids(got), ids(offered)
        told = [self.models[k](start + x[:t]) for t, (_, k) in enumerate(offered)]
        tau, y = self.verifiers[level - 1](
            self.models[level].rows(x, len(x) + 1, start),
            told,
            x,
            choices.bernoulli,
            choices.sample,
        )
        return tuple((token, level) for token in self.kept(x[:tau], y))


def ids(buffer: Buffer) -> Tokens:
    return tuple(token for token, _ in buffer)


def pick(distribution: Distribution, choices: Choices) -> Buffer:
    outcomes = list(distribution)
    return outcomes[choices.sample([distribution[o] for o in outcomes])]


def bias(cascade: Cascade, length: int) -> Fraction:
    """Total variation between the next ``length`` tokens and the target's."""
    target = Table(cascade.models[0].vocabulary, 1)
    distribution = extended(cascade.emitted(target), target, length)
    return distance(distribution, target.joint(length))


def models(vocabulary: int, count: int) -> list[Table]:
    return [Table(vocabulary, 100 + k) for k in range(count)]


@pytest.mark.parametrize("verifiers", list(product(VERIFIERS, repeat=2)))
@pytest.mark.parametrize(
    ("vocabulary", "shape"),
    [
        (2, {"rounds": 2}),
        (3, {"rounds": 1}),
        (2, {"rounds": 1, "tail": 2}),
        (2, {"rounds": 2, "num_tokens": 1, "tail": 1}),
    ],
)
def test_two_levels(verifiers, vocabulary, shape):
    cascade = Cascade(models(vocabulary, 2), list(verifiers), **shape)
    longest = cascade.rounds * (cascade.num_tokens + 1) + cascade.tail
    assert bias(cascade, longest + 1) == 0


@pytest.mark.parametrize("verifiers", list(product(VERIFIERS, repeat=3)))
def test_three_levels(verifiers):
    cascade = Cascade(models(2, 3), list(verifiers), num_tokens=1, rounds=1, tail=1)
    assert bias(cascade, 5) == 0


@pytest.mark.parametrize("verify", VERIFIERS)
def test_three_levels_of_two_rounds(verify):
    cascade = Cascade(models(2, 3), [verify] * 3, num_tokens=1, rounds=2)
    assert bias(cascade, 5) == 0


@pytest.mark.parametrize(
    "fault",
    [
        {"tail": 2, "said_level": lambda level, top: top},
        {"said_level": lambda level, top: 0},
        {"kept": lambda x, y: x},
    ],
    ids=["mid rows for an unverified tail", "rows of the level below", "corrected token dropped"],
)
@pytest.mark.parametrize("verify", VERIFIERS)
def test_faulty_cascades_are_caught(verify, fault):
    cascade = Cascade(models(2, 2), [verify] * 2, **fault)
    assert bias(cascade, 4) > Fraction(1, 1000)
