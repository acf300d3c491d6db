"""Chain verifiers with one fault each: the exact tests must reject them."""

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
