"""verify_chain against the sequential verifiers on equal uniforms, and its contract.

Arguments that do not fit are named, and rows that are no distributions end a draft.
"""

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


def batch(vocabulary: int, seed: int, size: int = 60):
    """A ragged batch: near and far drafts, masked tokens, greedy rows, equal rows, no draft."""
    gen = torch.Generator().manual_seed(seed)
    lengths, target, draft, ids = [], [], [], []
    for i in range(size):
        lengths.append(i % 7)
        for _ in range(i % 7):
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


def spans(lengths):
    """Rows of the target, and of the draft, of each request."""
    for i, (n, end) in enumerate(zip(lengths, accumulate(lengths), strict=True)):
        yield slice(end - n + i, end + i + 1), slice(end - n, end)


def by_hand(method, rows, uniforms):
    """(accepted, tokens) of every request from the sequential verifier and the same uniforms."""
    target, draft, ids, lengths = rows
    for t, d in spans(lengths):
        x, (u, *drawn) = ids[d].tolist(), uniforms[t].tolist()
        draws = iter(drawn)
        tau, y = VERIFIERS[method](
            target[t].tolist(),
            draft[d].tolist(),
            x,
            lambda h, c=draws: next(c) < h,
            lambda w, u=u: quantile(w, u),
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


def test_greedy_accepts_the_argmax_path():
    (target, draft, ids, lengths), _ = batch(31, seed=4)
    ids[::2] = torch.cat([target[t][:-1].argmax(-1) for t, _ in spans(lengths)])[::2]
    expected = [
        sequential.greedy(target[t].tolist(), draft[d].tolist(), ids[d].tolist(), None, None)
        for t, d in spans(lengths)
    ]
    for rows in (target, target.log(), target.float().log(), target.log().bfloat16()):
        result = verify_chain(rows, None, ids, lengths, method="greedy")
        finals = [row[-1] for row in emitted(result)]
        assert list(zip(result.num_accepted.tolist(), finals, strict=True)) == expected


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
    (target, draft, ids, lengths), uniforms = batch(31, seed=6)
    ids[1::4] = -1
    draft[ids < 0] = torch.nan
    result = emitted(verify_chain(target, draft, ids, lengths, method=method, uniforms=uniforms))
    for found, (t, d) in zip(result, spans(lengths), strict=True):
        m = [*ids[d].tolist(), -1].index(-1)
        until, drawn = (target[t][: m + 1], draft[d][:m], ids[d][:m], [m]), uniforms[t][: m + 1]
        assert [found] == emitted(verify_chain(*until, method=method, uniforms=drawn))


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


V = 4


def arguments(**changes):
    """A sound batch of two requests, drafts of 2 and 1, with changes."""
    good = {
        "target_probs": torch.full((5, V), 1 / V),
        "draft_probs": torch.full((3, V), 1 / V),
        "draft_token_ids": torch.tensor([0, 1, 2]),
        "num_draft_tokens": [2, 1],
    }
    return good | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_tokens": [2, -1]}, r"num_draft_tokens\[1\] is -1"),
        ({"num_draft_tokens": [2, 2]}, r"target_probs must have shape \[6, V\].*got \[5, 4\]"),
        ({"num_draft_tokens": [[2, 1]]}, r"num_draft_tokens must be a list of ints"),
        ({"num_draft_tokens": [2, 1.5]}, r"num_draft_tokens must be a list of ints"),
        ({"target_probs": torch.ones(5, V, 1)}, r"target_probs must have shape \[5, V\]"),
        ({"target_probs": torch.ones(5, 0)}, r"target_probs must have shape \[5, V\]"),
        ({"target_probs": torch.ones(5, V).long()}, "target_probs must be a floating-point tensor"),
        ({"target_probs": torch.ones(5, V).half()}, "target_probs must be float32 or float64"),
        ({"draft_probs": torch.ones(2, V) / V}, r"draft_probs must have shape \[3, V\]"),
        ({"draft_probs": torch.ones(3, 5) / 5}, "draft_probs .* does not match target_probs"),
        ({"draft_probs": torch.ones(3, V).double()}, "draft_probs .* does not match target_probs"),
        ({"draft_probs": torch.ones(3, V, device="meta")}, "draft_probs .* does not match"),
        ({"draft_token_ids": torch.tensor([0, 1])}, r"draft_token_ids must have shape \[3\]"),
        ({"draft_token_ids": torch.tensor([0, 4, 9])}, r"draft_token_ids\[1\] is 4, outside"),
        ({"draft_token_ids": torch.tensor([0, 1, -2])}, r"draft_token_ids\[2\] is -2, outside"),
        ({"draft_token_ids": torch.ones(3)}, "draft_token_ids must be an int64 or int32 tensor"),
        ({"draft_token_ids": torch.ones(3, device="meta").int()}, "draft_token_ids is on meta"),
        ({"method": "traversal"}, "method must be one of block, standard, greedy"),
        ({"uniforms": torch.rand(4).double()}, r"uniforms must be float64 \[5\]"),
        ({"uniforms": torch.rand(5)}, r"uniforms must be float64 \[5\]"),
        ({"uniforms": torch.tensor([0, 0, 1.0, 0, 0]).double()}, r"uniforms\[2\] is 1.0"),
        ({"uniforms": torch.tensor([0, torch.nan, 0, 0, 0]).double()}, r"uniforms\[1\] is nan"),
    ],
)
def test_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        verify_chain(**arguments(**changes))


FAULTS = {
    "nan": torch.tensor([torch.nan, 0.5, 0.5, 0]),
    "inf": torch.tensor([torch.inf, 0.5, 0.5, 0]),
    "negative": torch.tensor([-0.5, 0.5, 0.5, 0.5]),
    "sum": torch.tensor([0.25, 0.25, 0.25, 0.252]),
    "zero": torch.zeros(4),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("fault", "token"), [("nan", 0), ("inf", 0), ("negative", 1), ("zero", 0)])
@pytest.mark.parametrize("request_number", [0, 1])
def test_first_target_row_that_is_not_a_distribution_gives_its_argmax(
    method, fault, token, request_number
):
    """What vLLM's own sampler gives; the other request of the batch is not touched."""
    uniforms = torch.rand(5, dtype=torch.float64)
    untouched = verify_chain(**arguments(), method=method, uniforms=uniforms)
    target = arguments()["target_probs"]
    target[3 * request_number] = FAULTS[fault]
    result = verify_chain(**arguments(target_probs=target), method=method, uniforms=uniforms)
    if method != "greedy":
        assert result.token_ids[request_number].tolist() == [token, -1, -1]
        assert result.num_accepted[request_number] == 0
    other = 1 - request_number
    assert result.token_ids[other].tolist() == untouched.token_ids[other].tolist()


@pytest.mark.parametrize("row", [[torch.nan] * 3, [-torch.inf] * 3, [0.0, torch.inf, torch.nan]])
def test_greedy_follows_the_argmax_whatever_the_logits_are(row):
    logits = torch.tensor([[0.0, 2.0, 1.0], row, [0.0, 0.0, 3.0]])
    best = logits.argmax(-1).tolist()
    for draft in ([1, 0], [1, 1], [1, 2]):
        result = verify_chain(logits, None, torch.tensor(draft), [2], method="greedy")
        accepted = 1 + (draft[1] == best[1])
        assert result.token_ids.tolist() == [best[: accepted + 1] + [-1] * (2 - accepted)]


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
    for _ in range(20):
        p, q = (torch.rand(rows, V, generator=gen).softmax(-1) for rows in (5, 4))
        x, uniforms = torch.randint(V, (4,), generator=gen), torch.rand(5, dtype=torch.float64)
        until = {"method": method, "uniforms": uniforms[: t + 1]}
        expected = verify_chain(p[: t + 1], q[:t], x[:t], [t], **until)
        (q if row == "proposal" else p)[t] = FAULTS[fault]
        result = verify_chain(p, q, x, [4], method=method, uniforms=uniforms)
        assert result.num_accepted == expected.num_accepted
        tokens = expected.token_ids[0].tolist()
        if row == "target" and expected.num_accepted == t:
            tokens[t] = -1
        assert result.token_ids[0, : t + 1].tolist() == tokens
        assert (result.token_ids[0, t + 1 :] == -1).all()
