"""Chain verifiers with one fault each: the exact tests must reject them."""

from fractions import Fraction
from functools import partial

from oracle.sequential import acceptance_probability, ratio, residual


def _block(p, q, x, bernoulli, sample, *, cap=True, final=None, weigh=None, first_failure=False):
    n = len(x)
    a, joint, tau, a_tau = 1, 1, 0, 1
    for t in range(1, n + 1):
        rho = ratio(p[t - 1], q[t - 1], x[t - 1])
        joint *= rho
        a = min(1, a * rho) if cap else min(1, a) * rho
        if t < n:
            h = 1 if a >= 1 else acceptance_probability(a, sum(residual(a, p[t], q[t])))
        else:
            h = min(1, joint if final == "joint" else a)
        if bernoulli(h):
            tau, a_tau = t, a
        elif first_failure:
            break
    if tau == n:
        return tau, sample(p[n])
    weights = residual(1 if weigh == "plain" else a_tau, p[tau], q[tau])
    return tau, sample(weights if sum(weights) > 0 else p[tau])


def _standard(p, q, x, bernoulli, sample, *, accept=None, recovered=None, bonus=None):
    for t, token in enumerate(x):
        h = min(1, ratio(p[t], q[t], token))
        if not bernoulli(h if accept is None else accept(t, h, p, q, token)):
            weights = residual(1, p[t], q[t])
            sound = weights if sum(weights) > 0 else p[t]
            return t, sample(sound if recovered is None else recovered(p[t]))
    return len(x), sample(p[len(x)] if bonus is None else bonus(p[len(x)]))


# What is wrong -> the rule.
BLOCK = {
    # As in Zhou et al.'s code.
    "the uncapped joint ratio accepts the whole draft": partial(_block, final="joint"),
    "the running maximum leaves out the position itself": partial(_block, cap=False),
    "(p - q)+ recovers in place of (a * p - q)+": partial(_block, weigh="plain"),
    "the first rejection ends the prefix": partial(_block, first_failure=True),
}
STANDARD = {
    "a ratio that is a fifth too large": partial(
        _standard, accept=lambda t, h, p, q, x: min(1, Fraction(6, 5) * ratio(p[t], q[t], x))
    ),
    "nine tenths of the probability": partial(
        _standard, accept=lambda t, h, p, q, x: Fraction(9, 10) * h
    ),
    "the target's row of the next position": partial(
        _standard, accept=lambda t, h, p, q, x: min(1, ratio(p[t + 1], q[t], x))
    ),
    "a tenth is accepted without a look": partial(
        _standard, accept=lambda t, h, p, q, x: Fraction(1, 10) + Fraction(9, 10) * h
    ),
    "half of the second places are": partial(
        _standard, accept=lambda t, h, p, q, x: Fraction(1, 2) + h / 2 if t == 1 else h
    ),
    "the target recovers in place of the residual": partial(_standard, recovered=lambda p: p),
    "a squared row gives the bonus token": partial(_standard, bonus=lambda p: [v * v for v in p]),
}
