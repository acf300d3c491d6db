"""Verification rules of "Overcoming Joint Intractability", enumerated: tokens a step, and bias.

    python -m benchmarks.paper_tables.verifiers

Random models over a few tokens, all drafts, all outcomes: no sampling. Token-level and block
verification keep the target's distribution. The paper's two other readings emit as many or more
tokens and do not: the maximum of its ratio without the position itself, and the last ratio left
uncapped, as in its released code (Theorem 7 compares such a rule with block verification).
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import RESULTS, options, write_csv

Floats = NDArray[np.float64]
RULES = ("token-level", "block", "exclusive cap", "uncapped last ratio")
PAIRS = 100
# Vocabulary, draft length.
SIZES = ((4, 2), (4, 3), (4, 4), (2, 8))
# Share of the drafter's rows that has nothing to do with the target's.
MIXTURES = (0.3, 0.6, 1.0)


def random_rows(
    vocabulary: int, length: int, mixture: float, rng: np.random.Generator
) -> tuple[list[Floats], list[Floats]]:
    """Rows of a target and of its drafter after every text of t tokens: [V^t, V] each.

    t is 0..length for the target, 0..length - 1 for the drafter.
    """
    p = [rng.dirichlet(np.ones(vocabulary), vocabulary**t) for t in range(length + 1)]
    other = [rng.dirichlet(np.ones(vocabulary), len(rows)) for rows in p[:-1]]
    q = [(1 - mixture) * a + mixture * b for a, b in zip(p[:-1], other, strict=True)]
    return p, q


def outcome(p: list[Floats], q: list[Floats], rule: str) -> tuple[float, float]:
    """(expected tokens of a step, total variation of the text to the target's) of a rule.

    The text is continued by the target to one token more than a draft has.
    """
    vocabulary, n = p[0].shape[1], len(q)

    def by_draft(rows: Floats, t: int) -> Floats:
        """[V^t, ...] of texts of t tokens as [V^n, ...] of the drafts that begin with them."""
        return np.repeat(rows, vocabulary ** (n - t), axis=0)

    chance = joint_distribution(q)
    rho = [by_draft((p[t] / q[t]).ravel(), t + 1) for t in range(n)]
    # By draft: a_t, P(the first t tokens are offered and accepted), what is drawn after them.
    a, success, after = np.ones_like(chance), [np.ones_like(chance)], []
    for t in range(n + 1):
        if t and rule == "exclusive cap":
            a = np.minimum(a, 1) * rho[t - 1]
        elif t and rule != "token-level":
            a = np.minimum(a * rho[t - 1], 1)
        target = by_draft(p[t], t)
        rest = np.maximum(a[:, None] * target - by_draft(q[t], t), 0) if t < n else target
        mass = rest.sum(1, keepdims=True)
        after.append(np.where(mass > 0, rest, target) / np.where(mass > 0, mass, 1))
        if not t:
            continue
        if rule == "token-level":
            success.append(success[-1] * np.minimum(rho[t - 1], 1))
        elif t < n:
            success.append(np.where(a < 1, mass[:, 0] / (mass[:, 0] + 1 - np.minimum(a, 1)), 1))
        else:
            last = np.prod(rho, 0) if rule == "uncapped last ratio" else a
            success.append(np.minimum(last, 1))
    text, tokens, later = np.zeros(vocabulary ** (n + 1)), 0.0, np.ones_like(chance)
    for t in range(n, -1, -1):
        if rule == "token-level":
            ends = success[t] - (success[t + 1] if t < n else 0)
        else:
            ends, later = success[t] * later, (1 - success[t]) * later
        tokens += (t + 1) * float((chance * ends).sum())
        emitted = (chance * ends)[:, None] * after[t]
        emitted = emitted.reshape(vocabulary**t, -1, vocabulary).sum(1).ravel()
        for rows in p[t + 1 :]:
            emitted = (emitted[:, None] * rows).ravel()
        text += emitted
    return tokens, float(0.5 * np.abs(text - joint_distribution(p)).sum())


def joint_distribution(rows: list[Floats]) -> Floats:
    """[V^n] probabilities of all texts of n tokens."""
    found = np.ones(1)
    for each in rows:
        found = (found[:, None] * each).ravel()
    return found


def table() -> Iterator[dict[str, object]]:
    """A row for every size, mixture and rule: means over PAIRS pairs of models, and extremes."""
    for vocabulary, length in SIZES:
        for mixture in MIXTURES:
            rng = np.random.default_rng(0)
            pairs = [random_rows(vocabulary, length, mixture, rng) for _ in range(PAIRS)]
            found = {rule: np.array([outcome(*pair, rule) for pair in pairs]) for rule in RULES}
            for rule, values in found.items():
                over = values[:, 0] / found["block"][:, 0] - 1
                yield {
                    "vocabulary": vocabulary,
                    "draft_length": length,
                    "mixture": mixture,
                    "rule": rule,
                    "pairs": PAIRS,
                    "tokens_per_step": float(values[:, 0].mean()),
                    "over_block": float(over.mean()),
                    "over_block_least": float(over.min()),
                    "over_block_most": float(over.max()),
                    "total_variation": float(values[:, 1].mean()),
                    "total_variation_most": float(values[:, 1].max()),
                }


def main() -> None:
    output = options(__doc__, RESULTS / "paper_tables").parse_args().output
    path, rows = output / "verifiers.csv", list(table())
    write_csv(path, rows)
    for rule in RULES:
        own = [row for row in rows if row["rule"] == rule]
        over, biased = (
            [float(str(row[key])) for row in own] for key in ("over_block", "total_variation")
        )
        print(
            f"{rule}: tokens over block {min(over):+.2%} to {max(over):+.2%}, total variation "
            f"{min(biased):.4f} to {max(biased):.4f} (means of {PAIRS} pairs)"
        )
    print(f"Written: {path}")


if __name__ == "__main__":
    main()
