"""verify_chain against the sequential verifiers on equal uniforms, and its contract."""

from itertools import accumulate

import pytest
import torch
from oracle import sequential

from vllm_hsd.rules import verify_chain

VERIFIERS = {"block": sequential.block, "standard": sequential.standard}
METHODS = [*VERIFIERS, "greedy"]


def random_row(vocabulary: int, sharpness: float, gen: torch.Generator) -> torch.Tensor:
    logits = sharpness * torch.randn(vocabulary, generator=gen, dtype=torch.float64)
    if vocabulary > 1:
        logits[torch.rand(vocabulary, generator=gen) < 0.2] = -torch.inf
        logits[torch.randint(vocabulary, (), generator=gen)] = 0.0
    return logits.softmax(-1)


def one_hot(row: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(row.argmax(), row.numel()).to(row)


def batch(vocabulary: int, seed: int, size: int = 60, longest: int = 6):
    """A ragged batch: near and far drafts, masked tokens, greedy rows, equal rows, no draft."""
    gen = torch.Generator().manual_seed(seed)
    lengths, target, draft, ids = [], [], [], []
    for i in range(size):
        n = i % (longest + 1)
        lengths.append(n)
        for _ in range(n):
            p = random_row(vocabulary, 2.0, gen)
            kind = i % 5
            q = p.clone() if kind == 0 else random_row(vocabulary, 1.0, gen)
            if kind == 1:
                q = (7 * p + q) / 8
            target.append(one_hot(p) if kind == 2 else p)
            draft.append(one_hot(q) if kind == 3 else q)
            ids.append(int(torch.multinomial(draft[-1], 1, generator=gen)))
        target.append(random_row(vocabulary, 2.0, gen))
    uniforms = torch.rand(len(target), generator=gen, dtype=torch.float64)
    rows = torch.stack(target), torch.stack(draft), torch.tensor(ids), lengths
    return rows, uniforms


def quantile(weights, u: float) -> int:
    """The token at quantile u of unnormalised weights."""
    edges = list(accumulate(weights))
    return next(i for i, edge in enumerate(edges) if edge > u * edges[-1])


def requests(target, draft, ids, lengths, uniforms):
    """The batch cut into (p rows, q rows, tokens, uniforms), as lists."""
    p0 = q0 = 0
    for n in lengths:
        p, q = target[p0 : p0 + n + 1].tolist(), draft[q0 : q0 + n].tolist()
        yield p, q, ids[q0 : q0 + n].tolist(), uniforms[p0 : p0 + n + 1].tolist()
        p0, q0 = p0 + n + 1, q0 + n


def by_hand(method, rows, uniforms):
    """(accepted, tokens) of every request from the sequential verifier and the same uniforms."""
    for p, q, x, drawn in requests(*rows, uniforms):
        draws = iter(drawn[1:])
        tau, y = VERIFIERS[method](
            p, q, x, lambda h, c=draws: next(c) < h, lambda w, u=drawn[0]: quantile(w, u)
        )
        yield tau, [*x[:tau], y]


def emitted(result) -> list[list[int]]:
    return [[t for t in row if t >= 0] for row in result.token_ids.tolist()]


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 31, 300, 700])
@pytest.mark.parametrize("method", VERIFIERS)
def test_equal_uniforms_give_equal_tokens(method, vocabulary):
    rows, uniforms = batch(vocabulary, seed=vocabulary)
    result = verify_chain(*rows, method=method, uniforms=uniforms)
    expected = list(by_hand(method, rows, uniforms))
    assert result.num_accepted.tolist() == [tau for tau, _ in expected]
    assert emitted(result) == [tokens for _, tokens in expected]
    assert result.token_ids.shape == (len(rows[3]), max(rows[3]) + 1)
    assert result.token_ids.dtype == result.num_accepted.dtype == torch.int64


@pytest.mark.parametrize("method", VERIFIERS)
def test_one_hot_drafts_need_no_rows(method):
    (target, _, ids, lengths), uniforms = batch(31, seed=3)
    draft = torch.nn.functional.one_hot(ids, 31).to(target)
    with_rows = verify_chain(target, draft, ids, lengths, method=method, uniforms=uniforms)
    without = verify_chain(target, None, ids, lengths, method=method, uniforms=uniforms)
    assert emitted(with_rows) == emitted(without)


def test_greedy_accepts_the_argmax_path():
    (target, draft, ids, lengths), _ = batch(31, seed=4)
    ids[::2] = torch.cat([target[s : s + n].argmax(-1) for s, n in starts(lengths)])[::2]
    expected = [
        sequential.greedy(p, q, x, None, None)
        for p, q, x, _ in requests(target, draft, ids, lengths, target[:, 0])
    ]
    for rows in (target, target.log(), target.float().log(), target.log().bfloat16()):
        result = verify_chain(rows, None, ids, lengths, method="greedy")
        finals = [row[-1] for row in emitted(result)]
        assert list(zip(result.num_accepted.tolist(), finals, strict=True)) == expected


def starts(lengths):
    first = 0
    for n in lengths:
        yield first, n
        first += n + 1


def test_greedy_takes_the_first_of_tied_maxima():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 1.0]])
    accepted = verify_chain(logits, None, torch.tensor([1]), [1], method="greedy")
    assert accepted.token_ids.tolist() == [[1, 0]]
    refused = verify_chain(logits, None, torch.tensor([2]), [1], method="greedy")
    assert refused.token_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_empty_drafts(method, lengths):
    target = torch.eye(4)[: len(lengths)]
    none = torch.empty(0, dtype=torch.int64)
    for draft in (None, torch.empty(0, 4)):
        result = verify_chain(target, draft, none, lengths, method=method)
        assert result.token_ids.tolist() == [[i] for i in range(len(lengths))]
        assert result.num_accepted.tolist() == [0] * len(lengths)


@pytest.mark.parametrize("method", METHODS)
def test_empty_slots_end_the_draft(method):
    rows, uniforms = batch(31, seed=6)
    target, draft, ids, lengths = rows
    holes = ids.clone()
    holes[torch.arange(ids.numel()) % 4 == 1] = -1
    draft_rows = draft.clone()
    draft_rows[holes < 0] = torch.nan
    result = verify_chain(target, draft_rows, holes, lengths, method=method, uniforms=uniforms)
    q0 = 0
    for i, (first, n) in enumerate(starts(lengths)):
        x = holes[q0 : q0 + n].tolist()
        m = x.index(-1) if -1 in x else n
        alone = verify_chain(
            target[first : first + m + 1],
            draft[q0 : q0 + m],
            ids[q0 : q0 + m],
            [m],
            method=method,
            uniforms=uniforms[first : first + m + 1],
        )
        assert emitted(result)[i] == emitted(alone)[0]
        q0 += n


@pytest.mark.parametrize("method", METHODS)
def test_tokens_depend_on_nothing_but_the_request(method):
    rows, uniforms = batch(31, seed=8, size=20)
    target, draft, ids, lengths = rows
    whole = emitted(verify_chain(*rows, method=method, uniforms=uniforms))
    spans = [(first, n, first - i) for i, (first, n) in enumerate(starts(lengths))]
    picked = spans[::-1]
    turned = verify_chain(
        torch.cat([target[f : f + n + 1] for f, n, _ in picked]),
        torch.cat([draft[q : q + n] for _, n, q in picked]),
        torch.cat([ids[q : q + n] for _, n, q in picked]),
        [n for _, n, _ in picked],
        method=method,
        uniforms=torch.cat([uniforms[f : f + n + 1] for f, n, _ in picked]),
    )
    assert emitted(turned) == whole[::-1]


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_the_final_token_has_mass(u):
    """Extreme quantiles must not leave the support, in any block of a long vocabulary."""
    for vocabulary in (1, 2, 255, 256, 257, 5000):
        for token in {0, vocabulary // 2, vocabulary - 1}:
            row = torch.zeros(1, vocabulary)
            row[0, token] = 1
            uniforms = torch.tensor([u], dtype=torch.float64)
            none = torch.empty(0, dtype=torch.int64)
            result = verify_chain(row, None, none, [0], uniforms=uniforms)
            assert result.token_ids.tolist() == [[token]]
