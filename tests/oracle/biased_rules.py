"""Chain verifiers with one fault each: the exact tests must reject them."""

from fractions import Fraction

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


def uncapped_final_ratio(p, q, x, bernoulli, sample):
    """The whole draft is accepted with the uncapped joint ratio, as in Zhou et al.'s code."""
    return _block(p, q, x, bernoulli, sample, final="joint")


def exclusive_cap(p, q, x, bernoulli, sample):
    """The running maximum leaves out position t itself."""
    return _block(p, q, x, bernoulli, sample, cap=False)


def plain_residual(p, q, x, bernoulli, sample):
    """The recovered token is drawn from (p - q)+ in place of (a * p - q)+."""
    return _block(p, q, x, bernoulli, sample, weigh="plain")


def first_failure_ends(p, q, x, bernoulli, sample):
    """Positions are tried from the front and the first rejection ends the prefix."""
    return _block(p, q, x, bernoulli, sample, first_failure=True)


def _standard(p, q, x, bernoulli, sample, *, accept=None, recovered=None, bonus=None):
    for t, token in enumerate(x):
        h = min(1, ratio(p[t], q[t], token))
        if not bernoulli(h if accept is None else accept(t, h, p, q, token)):
            weights = residual(1, p[t], q[t])
            sound = weights if sum(weights) > 0 else p[t]
            return t, sample(sound if recovered is None else recovered(p[t]))
    return len(x), sample(p[len(x)] if bonus is None else bonus(p[len(x)]))


def generous_acceptance(*call):
    """The acceptance ratio is a fifth too large."""
    return _standard(
        *call, accept=lambda t, h, p, q, x: min(1, Fraction(6, 5) * ratio(p[t], q[t], x))
    )


def strict_acceptance(*call):
    """Drafts are accepted with nine tenths of their probability."""
    return _standard(*call, accept=lambda t, h, p, q, x: Fraction(9, 10) * h)


def neighbouring_row(*call):
    """A draft token is accepted by the target's row of the next position."""
    return _standard(*call, accept=lambda t, h, p, q, x: min(1, ratio(p[t + 1], q[t], x)))


def unseen_acceptance(*call):
    """A tenth of the draft tokens are accepted without a look."""
    return _standard(*call, accept=lambda t, h, p, q, x: Fraction(1, 10) + Fraction(9, 10) * h)


def unseen_at_second_place(*call):
    """The same, at the second place of a draft only."""
    return _standard(*call, accept=lambda t, h, p, q, x: Fraction(1, 2) + h / 2 if t == 1 else h)


def unsubtracted_recovery(*call):
    """The recovered token is drawn from the target in place of the residual."""
    return _standard(*call, recovered=lambda p: p)


def sharpened_bonus(*call):
    """The bonus token is drawn from the squared row."""
    return _standard(*call, bonus=lambda p: [v * v for v in p])
