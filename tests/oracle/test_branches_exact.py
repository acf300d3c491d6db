"""Exact distribution of one step with branches beside a chain, in fractions.

The chain is drawn and verified by plain loops; what follows it is the real `follow`.
"""

from fractions import Fraction

import numpy as np
import pytest
from oracle import sequential
from oracle.exact import ArgmaxOf, Choices, Table, Tokens, deviation, distance, distribution_of
from oracle.test_chain_exact import draft
from oracle.trees import one_hot

from vllm_hsd.rules.branches import follow
from vllm_hsd.rules.coupled import verify_coupled

V, N = 3, 2
# What the branches are, as a function of all tokens of the chain.
BRANCHES = {
    "none": lambda x: [],
    "fixed": lambda x: [(1, 2, 0)],
    "two that share a token": lambda x: [(1, 2), (1, 0, 0)],
    "avoids the first token": lambda x: [((x[0] + 1) % V, 0, 1)],
    "by both tokens": lambda x: [((x[0] + x[1]) % V, x[1])],
    "shares the first token": lambda x: [(x[0], (x[1] + 1) % V, 1)],
    "goes on after the chain": lambda x: [(*x, 1), (*x, 2)],
    "the chain again": lambda x: [x],
    "dropped where the chain begins so": lambda x: [(1, 2)] if x[0] != 1 else [],
    "every first token": lambda x: [(v,) for v in range(V)],
}
RULES = {"block": sequential.block, "standard": sequential.standard, "greedy": sequential.greedy}


def walked(emitted: Tokens, branches: list[Tokens], draw) -> Tokens:
    """What `follow` emits; draw: context -> token."""
    length = max([len(branch) for branch in branches], default=0)
    rows = np.zeros((1, len(branches), length), dtype=np.int64)
    for row, branch in zip(rows[0], branches, strict=True):
        row[: len(branch)] = branch
    counts = np.array([[len(branch) for branch in branches]], dtype=np.int64)

    def drawn(requests, numbers, places):
        (number,), (place,) = numbers.tolist(), places.tolist()
        assert requests.tolist() == [0] and place <= len(branches[number - 1])
        return np.array([draw(branches[number - 1], place)])

    found = follow(np.array([emitted]), np.array([len(emitted)]), rows, counts, drawn)
    text = tuple(found[0][0, : found[1][0]].tolist())
    winner = branches[found[2][0] - 1] if found[2][0] else emitted[:-1]
    assert winner[: len(text) - 1] == text[:-1] and text[: len(emitted)] == emitted
    return text


def step(p, q, verify, branches, draw=None, key=None):
    """The tokens that a step emits."""

    def program(choices: Choices) -> Tokens:
        x = draft(q, N, choices)
        rows = p.rows(x, N + 1), q.rows(x, N)
        tau, y = verify(*rows, x, choices.bernoulli, lambda row: choices.sample(row, key))

        def own(branch: Tokens, place: int) -> int:
            return choices.sample(p(branch[:place]), key)

        return walked((*x[:tau], y), branches(x), draw(p, choices) if draw else own)

    return program


def bias(p, program) -> Fraction:
    return deviation(program, p, N + 2)


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("branches", BRANCHES)
@pytest.mark.parametrize("rule", RULES)
def test_next_tokens_follow_the_target(rule, branches, lookup):
    for seed in range(2):
        p, q = Table(V, seed), Table(V, seed + 100)
        p, q = ArgmaxOf(p) if rule == "greedy" else p, ArgmaxOf(q) if lookup else q
        assert bias(p, step(p, q, RULES[rule], BRANCHES[branches])) == 0


@pytest.mark.parametrize("branches", BRANCHES)
def test_a_coupled_text_is_the_targets_own_with_the_noise_of_its_positions(branches):
    p, q = Table(V, 1), Table(V, 101)

    def program(choices: Choices) -> tuple[Tokens, Tokens]:
        x: Tokens = ()
        for t in range(N):
            x += (choices.sample(q(x), t),)

        def choose(requests, t):
            return np.array([choices.sample(p(x[:t]), t)])

        found, accepted = verify_coupled(np.array([x]), np.array([N]), choose)
        emitted = tuple(found[0, : accepted[0] + 1].tolist())
        text = walked(
            emitted,
            BRANCHES[branches](x),
            lambda branch, place: choices.sample(p(branch[:place]), place),
        )
        alone: Tokens = ()
        for t in range(N + 2):
            alone += (choices.sample(p(alone), t),)
            text += (choices.sample(p(text), t),) * (len(text) == t)
        return text, alone

    found = distribution_of(program)
    assert all(text == alone for text, alone in found)
    texts = {text: weight for (text, _), weight in found.items()}
    assert distance(texts, p.joint(N + 2)) == 0


def one_place_late(p, choices):
    return lambda branch, place: choices.sample(p(branch[: place - 1]))


def of_another_row(p, choices):
    """The row of a branch that has another token at the last place."""
    return lambda branch, place: choices.sample(
        p((*branch[: place - 1], (branch[place - 1] + 1) % V))
    )


@pytest.mark.parametrize("rule", ["block", "standard"])
@pytest.mark.parametrize("draw", [one_place_late, of_another_row])
def test_rows_of_other_nodes_are_caught(rule, draw):
    p, q = Table(V, 1), Table(V, 101)
    program = step(p, q, RULES[rule], BRANCHES["every first token"], draw=draw)
    assert bias(p, program) > Fraction(1, 1000)


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_uniforms_met_twice_are_caught(rule):
    p, q = Table(V, 1), Table(V, 101)
    program = step(p, q, RULES[rule], BRANCHES["goes on after the chain"], key="one for all")
    assert bias(p, program) > Fraction(1, 1000)


def drops_the_chain(branches):
    """A verifier without the drawn chain where a branch begins as it does."""

    def verify(p, q, x, bernoulli, sample):
        if any(branch[0] == x[0] for branch in branches(x)):
            return 0, sample(p[0])
        return sequential.block(p, q, x, bernoulli, sample)

    return verify


def test_a_drawn_chain_that_is_dropped_because_of_a_branch_is_caught():
    p, q, fixed = Table(V, 1), Table(V, 101), BRANCHES["fixed"]
    assert bias(p, step(p, q, drops_the_chain(fixed), fixed)) > Fraction(1, 1000)


def accepts_a_branch_by_the_residual(p, q, x, bernoulli, sample):
    """After a rejection a branch is accepted by the residual, and not taken out of it."""
    tau, y = sequential.standard(p, q, x, bernoulli, sample)
    if tau < len(x):
        left = sequential.residual(1, p[tau], q[tau])
        if sum(left) > 0 and bernoulli(left[1] / sum(left)):
            return tau, 1
    return tau, y


def test_a_branch_that_is_accepted_by_the_chains_own_residual_is_caught():
    p, q = Table(V, 1), Table(V, 101)
    program = step(p, q, accepts_a_branch_by_the_residual, BRANCHES["fixed"])
    assert bias(p, program) > Fraction(1, 1000)


@pytest.mark.parametrize("drawn_first", [True, False])
def test_a_drawn_row_that_is_verified_after_a_point_mass_is_caught(drawn_first):
    """By traversal, where both are children of the root and the point mass depends on the other."""
    p, q = Table(V, 1), Table(V, 101)

    def program(choices: Choices) -> Tokens:
        token = choices.sample(q(()))
        other = (token + 1) % V
        children = [
            (token, q(()), sequential.Node(p((token,)))),
            (other, one_hot(other, V), sequential.Node(p((other,)))),
        ]
        root = sequential.Node(p(()), children if drawn_first else children[::-1])
        return tuple(sequential.traversal(root, choices.bernoulli, choices.sample))

    found = bias(p, program)
    assert found == 0 if drawn_first else found > Fraction(1, 1000)


def test_requests_go_on_together_as_they_do_alone():
    """Random branches, some of them empty or shorter than what was emitted."""
    rng = np.random.default_rng(1)
    size, rows, length = 200, 3, 4
    branches = rng.integers(0, 2, (size, rows, length))
    branch_counts = rng.integers(0, length + 1, (size, rows))
    token_ids, counts = rng.integers(0, 2, (size, 3)), rng.integers(0, 4, size)
    token_ids[np.arange(3) >= counts[:, None]] = -1
    text = rng.integers(-1, 2, (size, length + 1))

    def draw(requests, numbers, places):
        return text[requests, places]

    together = follow(token_ids, counts, branches, branch_counts, draw)
    assert together[2].any() and (together[1] - counts).max() > 1
    emitted = together[0]
    for i in range(size):
        one = slice(i, i + 1)

        def own(requests, numbers, places, i=i):
            assert (branches[i, numbers[0] - 1, : places[0]] == emitted[i, : places[0]]).all()
            assert places[0] <= branch_counts[i, numbers[0] - 1]
            return text[i, places]

        alone = follow(token_ids[one], counts[one], branches[one], branch_counts[one], own)
        assert alone[1] == together[1][i] and alone[2] == together[2][i]
        assert (alone[0][0, : alone[1][0]] == emitted[i, : alone[1][0]]).all()
