"""sample_row and keep_rows against plain code, and their contract."""

import pytest
import torch
from support.kernel_batches import UNUSABLE_ROWS
from triton import jit
from triton import language as tl

from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.blocks import LOGIT_DTYPES, inverse_cdf_index
from vllm_hsd.kernels.keep_rows import keep_rows
from vllm_hsd.kernels.sample_row import sample_row

INF = float("inf")
CHUNK_AND_BLOCK = 512, 128


def _batch(vocab_size, dtype):
    """12 rows: random, half masked, invalid in every way, greedy, greedy with ties."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, vocab_size, generator=generator) * 3
    logits[2, 1::2] = -INF
    logits[3] = float("nan")
    logits[4] = -INF
    logits[5, vocab_size // 2] = INF
    logits[6, vocab_size - 1] = float("nan")
    logits[8, -1] = float("nan")
    logits[9] = 1.0
    logits[10] = -INF
    temperature = torch.rand(12, generator=generator) + 0.3
    temperature[7:11] = 0
    seeds = torch.randint(-(2**62), 2**62, (12,), generator=generator)
    return logits.to(dtype), temperature, seeds, torch.arange(12) + 2**33


@pytest.mark.every_kernel
@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [(1, torch.float16), (31, torch.bfloat16), *((2048, dtype) for dtype in LOGIT_DTYPES)],
)
def test_matches_reference(vocab_size, dtype, small_blocks):
    batch = _batch(vocab_size, dtype)
    token, lse = sample_row(*batch, level=2)
    expected, expected_lse = reference.sample_row(*batch, level=2)
    assert token.tolist() == expected.tolist()
    valid = expected_lse.isfinite()
    torch.testing.assert_close(lse[valid].double(), expected_lse[valid], rtol=1e-6, atol=1e-5)
    assert lse.isfinite().equal(valid)
    assert token[[3, 4, 5, 6, 10]].tolist() == [0, 0, 0, 0, 0]
    assert token[8] == vocab_size - 1


@pytest.mark.every_kernel
@pytest.mark.parametrize("shared_column", [False, True])
def test_rows_are_kept_where_the_verifier_finds_them(shared_column):
    """But for greedy rows and those without a slot; what a filter leaves out is -inf."""
    logits, lse = torch.randn(4, 5000), torch.randn(4)
    temperature, thresholds = torch.tensor([0.5, 2, 0, 1]), torch.tensor([-INF, 0.1, 0, 0])
    slots, columns = torch.tensor([3, 0, 1, -1]), torch.tensor([1, 0, 1, 0])
    if shared_column:
        columns = columns[0]
    kept, kept_lse = torch.zeros(4, 2, 5000), torch.zeros(4, 2)
    expected, expected_lse = kept.clone(), kept_lse.clone()
    for row, (slot, column) in enumerate(zip([3, 0], columns.expand(4).tolist(), strict=False)):
        outside = logits[row] / temperature[row] < thresholds[row]
        expected[slot, column] = logits[row].masked_fill(outside, -INF)
        expected_lse[slot, column] = lse[row]
    keep_rows(kept, kept_lse, logits, lse, temperature, thresholds, slots, columns)
    assert kept.equal(expected) and kept_lse.equal(expected_lse)


@pytest.mark.parametrize("kind", list(UNUSABLE_ROWS))
def test_an_invalid_row_gives_the_token_of_plain_vllm(kind, small_blocks):
    logits, temperature = torch.randn(3, 2048), torch.tensor([0.0, 0.7, 1.0])
    UNUSABLE_ROWS[kind](logits)
    token, lse = sample_row(logits, temperature, torch.arange(3), torch.arange(3))
    # vLLM's greedy token; its softmax of such a row is NaN everywhere, whatever that is divided by.
    probs = torch.softmax(logits[1:] / temperature[1:, None], -1)
    assert token.equal(torch.cat((logits[:1], probs)).argmax(-1))
    assert not lse[1:].isfinite().any()


def test_whole_vocabulary_and_default_blocks():
    logits, temperature, seeds, draws = (x[:2] for x in _batch(32000, torch.bfloat16))
    token, _ = sample_row(logits, temperature, seeds, draws)
    assert token.equal(reference.sample_row(logits, temperature, seeds, draws)[0])


def test_no_rows():
    empty = torch.empty(0)
    token, lse = sample_row(torch.empty(0, 5), empty, empty.long(), empty.long())
    assert token.shape == lse.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 4, dtype=torch.float64)}, "logits must be bfloat16"),
        ({"logits": torch.zeros(4, 2).T}, "contiguous rows"),
        ({"temperature": torch.ones(3)}, r"temperature must have shape \[12\]"),
        ({"seeds": torch.zeros(2)}, "seeds must be int64"),
        ({"draws": torch.zeros(2, 1, dtype=torch.int64)}, "draws must have shape"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    names = "logits", "temperature", "seeds", "draws"
    arguments = dict(zip(names, _batch(4, torch.float32), strict=True))
    with pytest.raises(ValueError, match=message):
        sample_row(**arguments | change)


@jit
def _pick_kernel(mass_ptr, goal_ptr, token_ptr, before_ptr, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    chosen, before = inverse_cdf_index(tl.load(mass_ptr + lane), lane, tl.load(goal_ptr))
    tl.store(token_ptr, chosen)
    tl.store(before_ptr, before)


@pytest.mark.parametrize(
    ("goal", "expected"), [(0, (1, 0)), (0.5, (2, 0.5)), (3.5, (4, 3.5)), (9, (2, 0.5))]
)
def test_a_goal_that_rounding_puts_past_the_end_is_the_heaviest_lanes(goal, expected):
    """Not the last one's, which may be a token that nearly never is."""
    mass = torch.tensor([0, 0.5, 3, 0, 0.2, 3, 1e-30, 0], dtype=torch.float64)
    given = torch.tensor([goal], dtype=torch.float64)
    token, before = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    _pick_kernel[(1,)](mass, given, token, before, LANES=len(mass))
    assert (token.item(), before.item()) == expected
    _pick_kernel[(1,)](torch.zeros_like(mass), given, token, before, LANES=len(mass))
    assert token.item() == 0
