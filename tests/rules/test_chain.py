"""verify_chain against the sequential verifiers on equal uniforms, and rows that are invalid."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from oracle import sequential

from vllm_hsd.rules import verify_chain

VERIFIERS = {"block": sequential.block, "standard": sequential.standard}


def random_row(vocabulary: int, sharpness: float, gen: torch.Generator) -> torch.Tensor:
    logits = sharpness * torch.randn(vocabulary, generator=gen, dtype=torch.float64)
    if vocabulary > 1:
        logits[torch.rand(vocabulary, generator=gen) < 0.2] = -torch.inf
        logits[torch.randint(vocabulary, (), generator=gen)] = 0.0
    return logits.softmax(-1)


def one_hot(row: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(row.argmax(), row.numel()).to(row)


def drafts(vocabulary: int, seed: int, size: int = 60):
    """Near and far drafts, masked tokens, greedy rows, point masses, equal rows, no draft."""
    gen = torch.Generator().manual_seed(seed)
    for i in range(size):
        n, kind = i % 7, i % 5
        p = torch.stack([random_row(vocabulary, 2.0, gen) for _ in range(n + 1)])
        q = p.clone() if kind == 0 else torch.stack([random_row(vocabulary, 1.0, gen) for _ in p])
        if kind == 1:
            q = (7 * p + q) / 8
        if kind == 2:
            p[:-1] = torch.stack([*map(one_hot, p)])[:-1]
        if kind == 3:
            q = torch.stack([*map(one_hot, q)])
        ids = torch.multinomial(q, 1, generator=gen)[:n, 0].tolist()
        uniforms = torch.rand(n + 1, generator=gen, dtype=torch.float64).tolist()
        yield p, q[:n], ids, uniforms


def quantile(weights, u: float) -> int:
    """The token at quantile u of unnormalised weights."""
    edges = list(accumulate(weights))
    return next(i for i, edge in enumerate(edges) if edge > u * edges[-1])


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 31, 300, 700])
@pytest.mark.parametrize("method", VERIFIERS)
def test_equal_uniforms_give_equal_tokens(method, vocabulary):
    for p, q, x, (u, *drawn) in drafts(vocabulary, seed=vocabulary):
        draws = iter(drawn)
        tau, y = VERIFIERS[method](
            p.tolist(),
            q.tolist(),
            x,
            lambda h, draws=draws: next(draws) < h,
            lambda w, u=u: quantile(w, u),
        )
        assert verify_chain(p, q, x, [u, *drawn], method=method) == ([*x[:tau], y], tau)


@pytest.mark.parametrize("method", VERIFIERS)
def test_greedy_rows_accept_the_argmax_path(method):
    for p, q, x, uniforms in drafts(31, seed=4):
        best = p.argmax(-1).tolist()
        x = [b if i % 2 else t for i, (t, b) in enumerate(zip(x, best, strict=False))]
        rows = torch.stack([*map(one_hot, p)])
        point_masses = torch.nn.functional.one_hot(torch.tensor(x, dtype=torch.int64), 31)
        tau, y = sequential.greedy(p.tolist(), q.tolist(), x, None, None)
        assert verify_chain(rows, point_masses.double(), x, uniforms, method=method) == (
            [*x[:tau], y],
            tau,
        )


@pytest.mark.parametrize("method", VERIFIERS)
def test_empty_slots_end_the_draft(method):
    for p, q, x, uniforms in drafts(31, seed=6):
        for m in range(len(x)):
            cut, bad = [*x[:m], -1, *x[m + 1 :]], q.clone()
            bad[m] = torch.nan
            expected = verify_chain(p[: m + 1], q[:m], x[:m], uniforms[: m + 1], method=method)
            assert verify_chain(p, bad, cut, uniforms, method=method) == expected


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_the_final_token_has_mass(u):
    """Extreme quantiles must not leave the support."""
    for vocabulary in (1, 2, 255, 256, 257, 5000):
        for token in {0, vocabulary // 2, vocabulary - 1}:
            row = torch.zeros(1, vocabulary)
            row[0, token] = 1
            assert verify_chain(row, row[:0], [], [u]) == ([token], 0)


V = 4
FAULTS = {
    "nan": torch.tensor([torch.nan, 0.5, 0.5, 0]),
    "inf": torch.tensor([torch.inf, 0.5, 0.5, 0]),
    "negative": torch.tensor([-0.5, 0.5, 0.5, 0.5]),
    "sum": torch.tensor([0.25, 0.25, 0.25, 0.252]),
    "zero": torch.zeros(4),
}


@pytest.mark.parametrize("method", VERIFIERS)
@pytest.mark.parametrize(("fault", "token"), [("nan", 0), ("inf", 0), ("negative", 1), ("zero", 0)])
def test_first_target_row_that_is_not_a_distribution_gives_its_argmax(method, fault, token):
    """What vLLM's own sampler gives."""
    target = torch.full((3, V), 1 / V)
    target[0] = FAULTS[fault]
    found = verify_chain(target, torch.full((2, V), 1 / V), [0, 1], [0.5] * 3, method=method)
    assert found == ([token], 0)


@pytest.mark.parametrize("method", VERIFIERS)
@pytest.mark.parametrize(
    ("row", "fault", "t"),
    [("proposal", fault, t) for fault in FAULTS for t in (0, 1, 3)]
    + [("target", fault, t) for fault in ("nan", "inf") for t in (1, 2, 4)],
)
def test_an_invalid_row_ends_the_draft(method, row, fault, t):
    """Of a proposal: before its token. The token that led to a row of the target is kept or refused
    as always, but nothing follows it."""
    gen = torch.Generator().manual_seed(0)
    for uniforms in np.random.default_rng(0).random((20, 5)):
        p, q = (torch.rand(rows, V, generator=gen).softmax(-1) for rows in (5, 4))
        x = torch.randint(V, (4,), generator=gen).tolist()
        tokens, tau = verify_chain(p[: t + 1], q[:t], x[:t], uniforms[: t + 1], method=method)
        (q if row == "proposal" else p)[t] = FAULTS[fault]
        if row == "target" and tau == t:
            tokens = tokens[:t]
        assert verify_chain(p, q, x, uniforms, method=method) == (tokens, tau)
