"""Coupled requests, whose noise is vLLM's, and filtered ones: drawing and verification."""

import pytest
import torch
from support import vllm_sampler
from support.kernel_batches import make_chains, padded

from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.chain_verify import verify_chain_padded
from vllm_hsd.kernels.filter_rows import Filters, row_thresholds
from vllm_hsd.kernels.sample_row import sample_row

pytestmark = pytest.mark.usefixtures("small_blocks")
CHUNK_AND_BLOCK = 128, 32
V = 300
# A batch of each kind: coupled, sampled and greedy requests, one without a draft.
TEMPERATURE = torch.tensor([-0.8, -1.0, 0.7, 0.0, -1.3, -0.8])
LENGTHS = [3, 2, 3, 3, 0, 3]


def plain_vllm_tokens(logits, temperature, seeds, positions):
    """Tokens that vLLM draws from rows whose temperature is not applied yet, int64 [N]."""
    try:
        *_, gumbel_sample = vllm_sampler.load_v2_sampler()
    except ImportError as error:
        pytest.skip(f"vLLM's sampler cannot be loaded: {error}")
    return gumbel_sample(
        logits.clone(),
        torch.arange(len(logits), dtype=torch.int32),
        temperature,
        seeds,
        positions,
        apply_temperature=True,
        is_drafting=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_drafter_draws_the_token_of_plain_vllm(dtype):
    g = torch.Generator().manual_seed(0)
    rows = 60
    logits = (torch.randn(rows, V, generator=g) * 2).to(dtype)
    temperature = -torch.rand(rows, generator=g) - 0.3
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=g)
    every_other = torch.randint(0, 2**33, (2 * rows,), generator=g)
    positions = every_other[::2]
    token, lse = sample_row(logits, temperature, seeds, seeds, positions=positions)
    expected = plain_vllm_tokens(logits, -temperature, seeds, positions)
    assert token.tolist() == expected.tolist()
    assert token.equal(
        reference.sample_row(logits, temperature, seeds, seeds, positions=positions)[0]
    )
    assert (lse == 0).all()
    # Negative control: the noise of the neighbouring position.
    other, _ = sample_row(logits, temperature, seeds, seeds, positions=(every_other + 1)[::2])
    assert (token != other).sum() > 20


@pytest.mark.every_kernel
def test_filtered_rows_are_drawn_from_alike():
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(40, V, generator=g) * 2
    temperature = torch.tensor([0.7, -0.9, 1.0, 0.0]).repeat(10)
    seeds = torch.randint(-(2**62), 2**62, (40,), generator=g)
    filters = Filters(torch.tensor([9] * 40).int(), torch.full((40,), 0.8), torch.zeros(40))
    thresholds = row_thresholds(logits, temperature, filters, index=torch.arange(40))
    options = {"thresholds": thresholds, "positions": seeds % 1000}
    token, lse = sample_row(logits, temperature, seeds, seeds, **options)
    expected, expected_lse = reference.sample_row(logits, temperature, seeds, seeds, **options)
    assert token.equal(expected)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    kept = reference.filtered(logits, temperature, thresholds).isfinite()
    assert kept[torch.arange(40), token].all()
    unfiltered, _ = sample_row(logits, temperature, seeds, seeds, positions=seeds % 1000)
    assert not kept[torch.arange(40), unfiltered].all()


def verification(skip: int, filtered: bool) -> tuple[dict, torch.Tensor]:
    """Arguments of a verification of drafts drawn with the same filters, and positions of rows."""
    batch, count = make_chains(V, LENGTHS, seed=2) | {"temperature": TEMPERATURE}, len(LENGTHS)
    lengths, rows, target = torch.tensor(LENGTHS), batch["draft_logits"], batch["target_logits"]
    owner = torch.arange(count).repeat_interleave(lengths + 1)
    of_draft = torch.arange(count).repeat_interleave(lengths)
    positions = torch.cat(
        [torch.arange(100 * i, 100 * i + n + 1 + skip) for i, n in enumerate(LENGTHS)]
    )
    noise = positions[torch.arange(len(owner)) + (owner + 1) * skip]
    filters = Filters(
        torch.tensor([0, 12, 12, 5, 7, 0]).int(),
        torch.tensor([0.9, 1.0, 0.8, 0.8, 1.0, 0.7]),
        torch.tensor([0.0, 0.05, 0.0, 0.0, 0.1, 0.05]),
    )
    thresholds = None
    if filtered:
        # The kernels keep what a draft was drawn from, with -inf for what was filtered.
        below = row_thresholds(rows, TEMPERATURE, filters, index=of_draft)
        rows = reference.filtered(rows, TEMPERATURE[of_draft], below)
        thresholds = row_thresholds(target, TEMPERATURE, filters, index=owner)
    tokens, lse = sample_row(
        rows,
        TEMPERATURE[of_draft],
        batch["seeds"][of_draft],
        torch.arange(len(rows)),
        positions=noise[torch.arange(len(rows)) + of_draft],
    )
    drafts = {"draft_logits": rows, "draft_token_ids": tokens, "draft_lse": lse}
    arguments = padded(**batch | drafts) | {
        "draft_length": lengths.flip(0),
        "thresholds": thresholds,
        "positions": positions,
        "position_skip": skip,
    }
    return arguments | {"draft_index": arguments["idx_mapping"]}, noise


@pytest.mark.parametrize("method", ["block", "standard"])
@pytest.mark.parametrize("filtered", [False, True], ids=["whole rows", "filtered"])
@pytest.mark.parametrize("skip", [0, 2])
def test_verification_matches_the_reference(method, filtered, skip):
    arguments, noise = verification(skip, filtered)
    result = verify_chain_padded(**arguments, method=method, level=2)
    expected = reference.verify_chain_padded(**arguments, method=method, level=2)
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert result.num_accepted.tolist() == expected.num_accepted.tolist()
    torch.testing.assert_close(
        result.target_lse, expected.target_lse, rtol=1e-5, atol=1e-5, equal_nan=True
    )
    assert result.num_accepted[[0, 1, 5]].sum() > 0
    target, cu = arguments["target_logits"], arguments["cu_num_logits"]
    owner = arguments["idx_mapping"].repeat_interleave(cu.diff())
    temperature, seeds = arguments["temperature"][owner], arguments["seeds"][owner]
    if filtered:
        target = reference.filtered(target, temperature, arguments["thresholds"])
    plain = plain_vllm_tokens(target, temperature.abs(), seeds, noise)
    for i in (TEMPERATURE < 0).nonzero()[:, 0].tolist():
        emitted = int(result.num_emitted[i])
        text = result.token_ids[i, :emitted].tolist()
        assert text == plain[cu[i] : cu[i] + emitted].tolist()
        # The draft ends exactly where it leaves that text.
        drafted = arguments["draft_sampled"][cu[i] + 1 : cu[i + 1]].tolist()
        assert text[:-1] == drafted[: emitted - 1]
        assert emitted == len(drafted) + 1 or text[-1] != drafted[emitted - 1]


def test_noise_of_another_position_is_caught():
    """Negative control of the comparison with plain vLLM."""
    arguments, _ = verification(0, False)
    result = verify_chain_padded(**arguments)
    shifted = verify_chain_padded(**arguments | {"positions": arguments["positions"] + 1})
    coupled = TEMPERATURE < 0
    assert not result.token_ids[coupled].equal(shifted.token_ids[coupled])
    assert result.token_ids[~coupled].equal(shifted.token_ids[~coupled])


def test_a_coupled_verification_reads_no_proposal_rows():
    arguments, _ = verification(0, False)
    expected = verify_chain_padded(**arguments)
    arguments["draft_logits"][arguments["temperature"] <= 0] = float("nan")
    assert verify_chain_padded(**arguments).token_ids.equal(expected.token_ids)
