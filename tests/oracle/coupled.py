"""Verification by the target's own draws: the text does not depend on what is drafted.

The target draws a token at every position from its own distribution there, with noise that belongs
to the position, and a draft is accepted while it equals these draws: what is emitted is what the
target alone emits with that noise (Daliri, Musco and Suresh, "Coupling without Communication and
Drafter-Invariant Speculative Decoding", arXiv:2408.07978). A drafter that draws with the same noise
is accepted with probability at least (1 - TV) / (1 + TV), a point mass at x with the best possible
one, p(x).
"""

from collections.abc import Callable

from oracle.exact import Tokens


def verify_coupled(draft: Tokens, draw: Callable[[int], int]) -> Tokens:
    """The emitted tokens: those of a draft that equal the target's draws, then its own.

    draw: t -> the target's token at position t, after the first t draft tokens; called once for
    each token that is emitted.
    """
    for t, token in enumerate(draft):
        if (drawn := draw(t)) != token:
            return (*draft[:t], drawn)
    return (*draft, draw(len(draft)))
