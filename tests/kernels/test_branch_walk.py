"""The walk along branches after a chain: against the plain rule, and its distribution."""

from functools import partial

import pytest
import torch
from support.proposal_states import poison_memory

from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.branch_walk import follow_branches
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.filter_rows import Filters

CHUNK_AND_BLOCK = 128, 32
V, K, R = 300, 3, 4
assert_equal = partial(torch.testing.assert_close, check_dtype=False)


def make_branches(requests: int) -> dict:
    """What the verification of chains emitted, and branches of which many begin so.

    Requests are greedy, coupled and sampled in turn. Their target's row depends on the last token
    alone, so equal texts have equal rows wherever they lie; the likeliest tokens are few.
    """
    g = torch.Generator().manual_seed(0)
    table = torch.randn(V, V, generator=g)
    table[:, :3] += 6

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 3, shape, generator=g)

    inputs, positions, counts, token_ids = [], [], [], torch.full((requests, K + 1), -1)
    emitted = torch.randint(0, K + 2, (requests,), generator=g).int()
    emitted[:3] = torch.tensor([0, 1, 2]).int()
    for i, m in enumerate(emitted.tolist()):
        token_ids[i, :m] = some(m)
        own = torch.randint(0, K + 2, (R,), generator=g)
        own[0] = own[0].clamp(min=1)
        flat = [some(int(n)) for n in own]
        for j in range(1, R):
            # Half of them begin with all that was emitted.
            shared = min(m, int(own[j]) - 1) if (i + j) % 2 else 0
            flat[j][1 : 1 + max(shared, 0)] = token_ids[i, : max(shared, 0)]
        inputs += flat
        counts.append(own)
        positions += [torch.arange(int(n)) + 50 * i for n in own]
    tokens, held = torch.cat(inputs), torch.stack(counts)
    temperature = torch.tensor([0.0, -0.8, 0.7, 1.2, -1.0])[torch.arange(requests + 2) % 5]
    return {
        "chain": ChainResult(token_ids, emitted, emitted, torch.empty(0)),
        "target_logits": table[tokens],
        "draft_sampled": tokens,
        "cu_num_logits": torch.tensor([0, *held.sum(1)]).cumsum(0),
        "idx_mapping": torch.arange(requests).flip(0) + 1,
        "offsets": (held.cumsum(1) - held).int(),
        "counts": held.int(),
        "temperature": temperature,
        "seeds": torch.randint(-(2**62), 2**62, (requests + 2,), generator=g),
        "draws": torch.randint(0, 2**40, (requests + 2,), generator=g),
        "max_tokens": K,
        "positions": torch.cat(positions),
    }


@pytest.mark.every_kernel
@pytest.mark.parametrize("filtered", [False, True], ids=["whole rows", "filtered"])
def test_equals_the_plain_rule(filtered, small_blocks, monkeypatch):
    batch = make_branches(15)
    if filtered:
        owner = batch["idx_mapping"].repeat_interleave(batch["cu_num_logits"].diff())
        number = len(batch["temperature"])
        filters = Filters(
            torch.full((number,), 4).int(), torch.full((number,), 0.8), torch.zeros(number)
        )
        batch["thresholds"] = reference.row_thresholds(
            batch["target_logits"], batch["temperature"], filters, index=owner
        )
    expected = reference.follow_branches(**batch, level=2)
    # All kinds of requests win by several rows, and some go on for more than one token.
    for kind in (-1, 0, 1):
        of_kind = batch["temperature"][batch["idx_mapping"]].sign() == kind
        assert expected.winner[of_kind].any()
    assert len(expected.winner.unique()) == R
    assert (expected.num_emitted - batch["chain"].num_emitted).max() > 1
    poison_memory(monkeypatch)
    assert_equal(follow_branches(**batch, level=2), expected)


def test_a_row_that_is_no_distribution_ends_the_walk(small_blocks):
    batch = make_branches(6)
    batch["target_logits"] = torch.full_like(batch["target_logits"], float("nan"))
    expected = reference.follow_branches(**batch)
    assert_equal(follow_branches(**batch), expected)
    sampled = batch["temperature"][batch["idx_mapping"]] > 0
    assert (expected.num_emitted == batch["chain"].num_emitted)[sampled].all()
