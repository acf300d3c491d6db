"""The verifiers as plain loops over lists, exact with fractions.Fraction.

Rows are sequences of numbers (Fraction or float), tokens are ints. Randomness comes from outside:
``bernoulli(h)`` is True with probability h, ``sample(weights)`` returns an index with probability
proportional to its weight. These functions define what `vllm_hsd.rules` must compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

Number = Fraction | float
Row = Sequence[Number]
Bernoulli = Callable[[Number], bool]
Sample = Callable[[Row], int]


def residual(a: Number, p: Row, q: Row) -> list[Number]:
    """max(a * p - q, 0), entry by entry."""
    return [max(a * pv - qv, 0) for pv, qv in zip(p, q, strict=True)]


def acceptance_probability(a: Number, s: Number) -> Number:
    """Acceptance probability at a position with prefix probability a and residual mass s."""
    return 1 if a == 1 else s / (s + 1 - a)


def ratio(p: Row, q: Row, x: int) -> Number:
    """p(x) / q(x), 0 for a token that its row cannot have drawn."""
    return p[x] / q[x] if q[x] > 0 else 0


def block(
    p: Sequence[Row], q: Sequence[Row], x: Sequence[int], bernoulli: Bernoulli, sample: Sample
) -> tuple[int, int]:
    """Block verification of one draft: (accepted length, next token).

    Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv:2403.10444.

    Args:
        p: n + 1 target rows; q: n proposal rows; x: n draft tokens.
    """
    n = len(x)
    a: Number = 1
    a_tau: Number = 1
    tau = 0
    for t in range(1, n + 1):
        a = min(1, a * ratio(p[t - 1], q[t - 1], x[t - 1]))
        h = acceptance_probability(a, sum(residual(a, p[t], q[t]))) if t < n else a
        if bernoulli(h):
            tau, a_tau = t, a
    if tau == n:
        return tau, sample(p[n])
    return tau, sample(_or_target(residual(a_tau, p[tau], q[tau]), p[tau]))


def standard(
    p: Sequence[Row], q: Sequence[Row], x: Sequence[int], bernoulli: Bernoulli, sample: Sample
) -> tuple[int, int]:
    """Standard rejection sampling; arguments and result as for block.

    Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
    arXiv:2211.17192.
    """
    for t, token in enumerate(x):
        if not bernoulli(min(1, ratio(p[t], q[t], token))):
            return t, sample(_or_target(residual(1, p[t], q[t]), p[t]))
    return len(x), sample(p[len(x)])


def greedy(
    p: Sequence[Row], q: Sequence[Row], x: Sequence[int], bernoulli: Bernoulli, sample: Sample
) -> tuple[int, int]:
    """Accept while the draft is the target's argmax; arguments and result as for block."""
    for t, token in enumerate(x):
        if token != argmax(p[t]):
            return t, argmax(p[t])
    return len(x), argmax(p[len(x)])


def coupled(x: Sequence[int], draw: Callable[[int], int]) -> tuple[int, ...]:
    """The emitted tokens: those of a draft that equal the target's own draws, then its next one.

    The noise of a draw belongs to the position, so the text does not depend on what is drafted
    (Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative
    Decoding", arXiv:2408.07978). A draft that is drawn with the same noise is accepted with
    probability at least (1 - TV) / (1 + TV), a point mass at y with the best possible one, p(y).

    Args:
        draw: t -> the target's token after t draft tokens; called once for each emitted token.
    """
    for t, token in enumerate(x):
        if (drawn := draw(t)) != token:
            return (*x[:t], drawn)
    return (*x, draw(len(x)))


class Node:
    """A node of a draft tree: the target's row there and its children in draw order.

    children: (token, row the token was drawn from, node) triples; a token drawn twice appears
    twice, with the same node.
    """

    def __init__(self, p: Row, children: Sequence[tuple[int, Row, Node]] = ()):
        self.p = p
        self.children = children


def traversal(root: Node, bernoulli: Bernoulli, sample: Sample) -> list[int]:
    """Traversal Verification of a tree: the accepted path and the token after it.

    Weng et al., "Traversal Verification for Speculative Tree Decoding", arXiv:2505.12398.
    """

    def visit(node: Node, path: list[int], a: Number) -> list[int] | None:
        row, seen = node.p, set()
        for token, drawn_from, child in node.children:
            if token not in seen:
                seen.add(token)
                below = min(1, a * ratio(row, drawn_from, token))
                if below > 0 and (result := visit(child, [*path, token], below)) is not None:
                    return result
            left = residual(a, row, drawn_from)
            s = sum(left)
            a, row = acceptance_probability(a, s), [w / s for w in left] if s > 0 else row
        if node is root or bernoulli(a):
            return [*path, sample(row)]
        return None

    emitted = visit(root, [], 1)
    assert emitted is not None
    return emitted


def recursive_rejection(root: Node, bernoulli: Bernoulli, sample: Sample) -> list[int]:
    """SpecInfer's rule: children in draw order, one token-level rejection after the other.

    Miao et al., "SpecInfer: Accelerating Large Language Model Serving with Tree-based Speculative
    Inference and Verification", arXiv:2305.09781.
    """
    node, path = root, []
    while True:
        row = node.p
        for token, drawn_from, child in node.children:
            if bernoulli(min(1, ratio(row, drawn_from, token))):
                node, path = child, [*path, token]
                break
            left = residual(1, row, drawn_from)
            s = sum(left)
            row = [w / s for w in left] if s > 0 else row
        else:
            return [*path, sample(row)]


def argmax(row: Row) -> int:
    """Index of the first maximum."""
    return max(range(len(row)), key=lambda v: (row[v], -v))


def _or_target(weights: Row, p: Row) -> Row:
    return weights if sum(weights) > 0 else p
