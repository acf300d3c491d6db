"""Arguments that do not fit, and rows that end a draft."""

import pytest
import torch

from vllm_hsd.rules import verify_chain

METHODS = ["block", "standard", "greedy"]
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


def chain(n: int, seed: int):
    gen = torch.Generator().manual_seed(seed)
    p = torch.rand(n + 1, V, generator=gen).softmax(-1)
    q = torch.rand(n, V, generator=gen).softmax(-1)
    return p, q, torch.randint(V, (n,), generator=gen)


@pytest.mark.parametrize("method", ["block", "standard"])
@pytest.mark.parametrize(
    ("row", "fault", "t"),
    [("proposal", fault, t) for fault in FAULTS for t in (0, 1, 3)]
    + [("target", fault, t) for fault in ("nan", "inf") for t in (1, 2, 4)],
)
def test_an_invalid_row_ends_the_draft(method, row, fault, t):
    """Of a proposal: before its token. The token that led to a row of the target is kept or refused
    as always, but nothing follows it."""
    for seed in range(20):
        p, q, x = chain(4, seed)
        uniforms = torch.rand(5, dtype=torch.float64)
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
