"""Exact distribution of one step with branches next to a chain, in fractions.

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

V, N = 3, 2
P, Q = Table(V, 1), Table(V, 101)
LEAST = Fraction(1, 1000)
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
    drawn_at = []

    def drawn(requests, numbers, places):
        (number,), (place,) = numbers.tolist(), places.tolist()
        assert requests.tolist() == [0] and place <= len(branches[number - 1])
        drawn_at.append(place)
        return np.array([draw(branches[number - 1], place)])

    found = follow(np.array([emitted]), np.array([len(emitted)]), rows, counts, drawn)
    text = tuple(found[0][0, : found[1][0]].tolist())
    winner = branches[found[2][0] - 1] if found[2][0] else emitted[:-1]
    assert winner[: len(text) - 1] == text[:-1] and text[: len(emitted)] == emitted
    assert drawn_at == list(range(len(emitted), len(text)))
    return text


def step(p, q, verify, branches, node=lambda branch, place: branch[:place], key=None):
    """The tokens that a step emits; node: the text whose row a place of a branch is drawn from."""

    def program(choices: Choices) -> Tokens:
        x = draft(q, N, choices)
        rows = p.rows(x, N + 1), q.rows(x, N)
        tau, y = verify(*rows, x, choices.bernoulli, lambda row: choices.sample(row, key))

        def draw(branch: Tokens, place: int) -> int:
            return choices.sample(p(node(branch, place)), key)

        return walked((*x[:tau], y), branches(x), draw)

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
    def program(choices: Choices) -> tuple[Tokens, Tokens]:
        def draw(text: Tokens, place: int) -> int:
            return choices.sample(P(text[:place]), place)

        x: Tokens = ()
        for t in range(N):
            x += (choices.sample(Q(x), t),)
        emitted = sequential.coupled(x, lambda t: draw(x, t))
        text = walked(emitted, BRANCHES[branches](x), draw)
        alone: Tokens = ()
        for t in range(N + 2):
            alone += (draw(alone, t),)
            text += (draw(text, t),) * (len(text) == t)
        return text, alone

    found = distribution_of(program)
    assert all(text == alone for text, alone in found)
    texts = {text: weight for (text, _), weight in found.items()}
    assert distance(texts, P.joint(N + 2)) == 0


def one_place_late(branch: Tokens, place: int) -> Tokens:
    return branch[: place - 1]


def of_another_row(branch: Tokens, place: int) -> Tokens:
    """Of a branch that has another token at the last place."""
    return (*branch[: place - 1], (branch[place - 1] + 1) % V)


@pytest.mark.parametrize("rule", ["block", "standard"])
@pytest.mark.parametrize(
    ("branches", "fault"),
    [
        ("every first token", {"node": one_place_late}),
        ("every first token", {"node": of_another_row}),
        ("goes on after the chain", {"key": "one for all"}),
    ],
    ids=["one place late", "of another row", "met twice"],
)
def test_rows_of_other_nodes_and_uniforms_met_twice_are_caught(rule, branches, fault):
    assert bias(P, step(P, Q, RULES[rule], BRANCHES[branches], **fault)) > LEAST


def drops_the_chain_for_a_branch(p, q, x, bernoulli, sample):
    """A verifier without the drawn chain where the fixed branch begins as it does."""
    if x[0] == 1:
        return 0, sample(p[0])
    return sequential.block(p, q, x, bernoulli, sample)


def accepts_a_branch_by_the_residual(p, q, x, bernoulli, sample):
    """After a rejection a branch is accepted by the residual, and not taken out of it."""
    tau, y = sequential.standard(p, q, x, bernoulli, sample)
    if tau < len(x):
        left = sequential.residual(1, p[tau], q[tau])
        if sum(left) > 0 and bernoulli(left[1] / sum(left)):
            return tau, 1
    return tau, y


@pytest.mark.parametrize("verify", [drops_the_chain_for_a_branch, accepts_a_branch_by_the_residual])
def test_chains_that_are_verified_by_branches_are_caught(verify):
    assert bias(P, step(P, Q, verify, BRANCHES["fixed"])) > LEAST


@pytest.mark.parametrize("drawn_first", [True, False])
def test_a_drawn_row_that_is_verified_after_a_point_mass_is_caught(drawn_first):
    """By traversal, where both are children of the root and the point mass depends on the other."""

    def program(choices: Choices) -> Tokens:
        token = choices.sample(Q(()))
        other = (token + 1) % V
        children = [
            (token, Q(()), sequential.Node(P((token,)))),
            (other, one_hot(other, V), sequential.Node(P((other,)))),
        ]
        root = sequential.Node(P(()), children if drawn_first else children[::-1])
        return tuple(sequential.traversal(root, choices.bernoulli, choices.sample))

    found = bias(P, program)
    assert found == 0 if drawn_first else found > LEAST
