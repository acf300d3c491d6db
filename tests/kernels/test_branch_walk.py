"""The walk along branches after a chain: against the plain rule, and its distribution."""

import pytest
import torch
from oracle import sequential
from oracle.exact import Choices, distribution_of
from support import kernel_reference as reference
from support.exact_joint_distribution import chi_square_p_value
from support.proposal_states import poison_memory

from vllm_hsd.kernels import branch_walk
from vllm_hsd.kernels.branch_walk import follow_branches
from vllm_hsd.kernels.chain_verify import ChainResult, verify_chain_padded
from vllm_hsd.kernels.filter_rows import Filters

CHUNK_AND_BLOCK = 128, 32
V, K, R = 300, 3, 4
KEPT, REJECTED = 1e-3, 1e-6


def make_branches(requests: int, seed: int = 0) -> dict:
    """What the verification of chains emitted, and branches of which many begin so.

    Requests are greedy, coupled and sampled in turn. Their target's row depends on the last token
    alone, so equal texts have equal rows wherever they lie; the likeliest tokens are few.
    """
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(V, V, generator=g)
    table[:, :3] += 6

    def some(*shape: int) -> torch.Tensor:
        return torch.randint(0, 3, shape, generator=g)

    inputs, offsets, counts, token_ids = [], [], [], torch.full((requests, K + 1), -1)
    emitted = torch.randint(0, K + 2, (requests,), generator=g).int()
    emitted[:3] = torch.tensor([0, 1, 2]).int()
    positions = []
    for i, m in enumerate(emitted.tolist()):
        token_ids[i, :m] = some(m)
        own = torch.randint(0, K + 2, (R,), generator=g)
        own[0] = own[0].clamp(min=1)
        begin = sum(map(len, inputs))
        flat = [some(int(n)) for n in own]
        for j in range(1, R):
            # Half of them begin with all that was emitted.
            shared = min(m, int(own[j]) - 1) if (i + j) % 2 else 0
            flat[j][1 : 1 + max(shared, 0)] = token_ids[i, : max(shared, 0)]
        inputs += flat
        offsets.append((own.cumsum(0) - own).tolist())
        counts.append(own.tolist())
        positions += [torch.arange(int(n)) + 50 * i for n in own]
        assert begin + int(own.sum()) == sum(map(len, inputs))
    tokens = torch.cat(inputs)
    temperature = torch.tensor([0.0, -0.8, 0.7, 1.2, -1.0])[torch.arange(requests + 2) % 5]
    return {
        "chain": ChainResult(token_ids, emitted, emitted, torch.empty(0)),
        "target_logits": table[tokens],
        "draft_sampled": tokens,
        "cu_num_logits": torch.tensor([0, *(sum(c) for c in counts)]).cumsum(0),
        "idx_mapping": torch.arange(requests).flip(0) + 1,
        "offsets": torch.tensor(offsets).int(),
        "counts": torch.tensor(counts).int(),
        "temperature": temperature,
        "seeds": torch.randint(-(2**62), 2**62, (requests + 2,), generator=g),
        "draws": torch.randint(0, 2**40, (requests + 2,), generator=g),
        "max_tokens": K,
        "positions": torch.cat(positions),
    }


def assert_equal(found, expected):
    for name, values, wanted in zip(found._fields, found, expected, strict=True):
        assert values.tolist() == wanted.tolist(), name


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
    found = follow_branches(**batch, level=2)
    assert_equal(found, expected)


def test_a_row_that_is_no_distribution_ends_the_walk(small_blocks):
    batch = make_branches(6)
    batch["target_logits"] = torch.full_like(batch["target_logits"], float("nan"))
    expected = reference.follow_branches(**batch)
    assert_equal(follow_branches(**batch), expected)
    sampled = batch["temperature"][batch["idx_mapping"]] > 0
    assert (expected.num_emitted == batch["chain"].num_emitted)[sampled].all()


# The exact distribution of one step: three tokens, a drawn chain of two, and three branches.
TABLE = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.6, 0.1, 0.3]]).log()
ROOT, CHAIN = 0, [1, 0]
BRANCHES = [[1, 0, 0], [0, 1, 2], [2, 2]]
PROPOSAL = torch.tensor([[0.3, 0.6, 0.1], [0.4, 0.3, 0.3]]).log()


def one_step(requests: int, shifted: int = 0):
    """Tokens that requests of one draft emit; `shifted`: branches read rows that far behind."""
    flat = [ROOT, *CHAIN]
    offsets, counts = [0], [len(flat)]
    for branch in BRANCHES:
        offsets.append(len(flat))
        counts.append(len(branch) + 1)
        flat += [ROOT, *branch]
    tokens = torch.tensor(flat).repeat(requests)
    cu, number = torch.arange(requests + 1) * len(flat), torch.arange(requests)
    state = torch.ones(requests), number * 1000003, torch.full((requests,), 5)
    logits = TABLE[tokens]
    chain = verify_chain_padded(
        logits,
        PROPOSAL.repeat(requests, 1, 1),
        tokens,
        cu,
        number,
        *state,
        max_draft_tokens=len(CHAIN),
        draft_length=torch.full((requests,), len(CHAIN)),
    )
    rows = [torch.tensor([v]).repeat(requests, 1).int() for v in (offsets, counts)]
    return follow_branches(
        chain, logits.roll(-shifted, 0), tokens, cu, number, *rows, *state, max_tokens=3
    )


def emitted(choices: Choices) -> tuple[int, ...]:
    """What a step emits: the chain's tokens, continued while a branch has them."""
    p, q = TABLE[[ROOT, *CHAIN]].softmax(-1).tolist(), PROPOSAL.softmax(-1).tolist()
    accepted, token = sequential.block(p, q, CHAIN, choices.bernoulli, choices.sample)
    text = (*CHAIN[:accepted], token)
    while any(tuple(branch[: len(text)]) == text for branch in BRANCHES):
        text += (choices.sample(TABLE[text[-1]].softmax(-1).tolist()),)
    return text


def p_value(found) -> float:
    exact = {text: float(p) for text, p in distribution_of(emitted).items()}
    pairs = zip(found.token_ids.tolist(), found.num_emitted.tolist(), strict=True)
    return chi_square_p_value([tuple(row[:count]) for row, count in pairs], exact)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_distribution_of_a_step():
    found = one_step(500)
    assert len(found.winner.unique()) == len(BRANCHES) + 1
    assert p_value(found) > KEPT


@pytest.mark.slow
def test_a_winners_row_one_off_is_found():
    assert p_value(one_step(400, shifted=1)) < REJECTED


@pytest.mark.slow
def test_uniforms_met_twice_are_found(monkeypatch):
    """The token after the chain's next one drawn with that one's uniform."""
    monkeypatch.setattr(branch_walk, "FIRST_DRAW", -1)
    assert p_value(one_step(150)) < REJECTED
