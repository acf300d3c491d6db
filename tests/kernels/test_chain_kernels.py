"""Chain kernels against the reference, and their contract."""

import pytest
import torch
from support.interpreter import count_bytes
from support.kernel_batches import (
    UNUSABLE_ROWS,
    draft_lse,
    make_chains,
    padded,
    verify_flat,
)
from support.proposal_states import poison_memory

from vllm_hsd.kernels import blocks, chain_verify
from vllm_hsd.kernels import naive as reference

INF = float("inf")
CHUNK_AND_BLOCK = 512, 128
# Of most tests: every other size would be compiled anew.
V, K = 600, 7


def assert_equal(result, expected):
    torch.testing.assert_close(result[:3], expected[:3], check_dtype=False)
    # A row that cannot be sampled has no finite logsumexp, and which one it has does not matter.
    finite = expected.target_lse.isfinite()
    assert result.target_lse.isfinite().equal(finite)
    torch.testing.assert_close(
        result.target_lse[finite], expected.target_lse[finite], rtol=1e-5, atol=1e-5
    )


def assert_matches(batch, result, **options):
    assert_equal(result, reference.verify_chain(**batch, **options))


@pytest.mark.every_kernel
@pytest.mark.parametrize("rows", ["rows", "lse", "one-hot"])
@pytest.mark.parametrize("method", chain_verify.METHODS)
def test_random_rows(method, rows, small_blocks, monkeypatch):
    """Also where memory that is read before it is written holds anything."""
    dtype = {"rows": torch.float32, "lse": torch.bfloat16, "one-hot": torch.float16}[rows]
    batch = make_chains(700, [K, 0, 3, 5, 4, 1, K, 2], dtype, one_hot=rows == "one-hot")
    lse = draft_lse(batch) if rows == "lse" else None
    poison_memory(monkeypatch)
    result = verify_flat(**batch, method=method, level=3, draft_lse=lse)
    assert_matches(batch, result, method=method, level=3)


@pytest.mark.parametrize("method", chain_verify.METHODS)
def test_another_draw_gives_another_token(method, small_blocks):
    """Negative control of the comparisons with the reference."""
    batch = make_chains(V, [3, 0, K, 1, 4, K], seed=7)
    batch["temperature"] = torch.linspace(0.6, 1.2, 6)
    batch["draws"] = torch.full((6,), 11)
    for level in (1, 3):
        result = verify_flat(**batch, method=method, level=level)
        assert_matches(batch, result, method=method, level=level)
    other = reference.verify_chain(**batch | {"draws": batch["draws"] + 1}, method=method, level=3)
    assert result.token_ids.tolist() != other.token_ids.tolist()


@pytest.mark.parametrize("vocab_size", [1, 31, 2048])
def test_vocabulary_sizes(vocab_size, small_blocks):
    """Drafts that are shorter than they may be."""
    batch = make_chains(vocab_size, [2, 3, 1, 3], torch.bfloat16, seed=vocab_size)
    batch["max_draft_tokens"] = 5
    assert_matches(batch, verify_flat(**batch))


def test_whole_vocabulary_and_default_blocks():
    batch = make_chains(32000, [2, 3], torch.bfloat16, noise=0.3)
    batch["temperature"][0] = 0.7
    assert_matches(batch, verify_flat(**batch))


@pytest.mark.parametrize("method", chain_verify.METHODS)
def test_degenerate_rows(method, small_blocks):
    """Saturated, masked, tied and invalid rows, empty slots, tokens outside the vocabulary."""
    batch = make_chains(V, [K] * 17)
    batch["temperature"] = torch.full((17,), 0.9)
    batch["temperature"][[8, 9, 14, 15, 16]] = 0
    target, draft = batch["target_logits"].view(17, -1, V), batch["draft_logits"].view(17, K, V)
    tokens = batch["draft_token_ids"].view(17, K)
    target[0, 1] = -INF  # all mass on one token, which the draft cannot have drawn
    target[0, 1, 7] = 1e4
    target[1, :, 300:] = -INF  # a masked half
    draft[1, :, :300] = -INF  # disjoint supports
    target[2] = 0  # flat
    draft[2] = 0
    target[3, 0, tokens[3, 0]] = -INF  # the drafted token is forbidden
    target[4, 2, 5] = float("nan")  # invalid after two tokens
    draft[5, 1, 5] = INF
    target[6, K] = -INF  # no token after the whole draft
    draft[6] = target[6, :K]
    tokens[6] = target[6, :K].argmax(-1)
    tokens[7, 2] = -1
    target[8] = 1.0  # ties of a greedy request go to the lowest token
    tokens[8, :4] = torch.tensor([0, 0, 1, 0])
    target[9, 3, 9] = float("nan")
    tokens[9] = target[9, :K].nan_to_num(0).argmax(-1)
    tokens[11, 1] = V
    # The request's own row, at temperature 0.9 and 0, where a draft may begin with its argmax.
    for change, rows in zip(UNUSABLE_ROWS.values(), ([10, 14], [12, 15], [13, 16]), strict=True):
        own = target[rows, 0]
        change(own)
        target[rows, 0], tokens[rows[1], 0] = own, own[1].argmax()
    result = verify_flat(**batch, method=method)
    assert_matches(batch, result, method=method)
    assert result.num_emitted[6] == result.num_accepted[6] == K
    assert result.token_ids[[10, 12, 13]].tolist() == [[0] + [-1] * K] * 3
    assert (result.num_accepted[14:] >= 1).all()
    assert result.num_accepted[7] <= 2 and result.num_accepted[11] <= 1


def test_nearly_equal_rows_and_rising_ratios(small_blocks):
    """Ratios that fall to e^-8 and rise again: only a cap that includes t gives these tokens."""
    batch = make_chains(V, [5] * 6, noise=1e-3, seed=3) | {"max_draft_tokens": K}
    batch["temperature"] = torch.ones(6)
    draft = batch["draft_logits"].view(6, 5, V)
    tokens = batch["draft_token_ids"].view(6, 5)
    for i, sign in enumerate([(8, -8, 8, -8, 0), (2, 2, -6, 1, 1), (-5, 0, 5, 0, 0)]):
        for t, shift in enumerate(sign):
            draft[i, t, tokens[i, t]] += shift
    assert_matches(batch, verify_flat(**batch))


def test_a_forbidden_token_after_a_doubtful_prefix(small_blocks):
    """p(x_2) = 0 and p in proportion to q elsewhere leave no residual at 1, whatever a_1 is."""
    batch = make_chains(V, [2] * 12, noise=0.0) | {"max_draft_tokens": K}
    batch["temperature"] = torch.ones(12)
    target, draft = batch["target_logits"].view(12, 3, V), batch["draft_logits"].view(12, 2, V)
    target[:], draft[:] = 0, 0
    tokens = batch["draft_token_ids"].view(12, 2)
    tokens[:] = torch.tensor([3, 7])
    draft[:, 0, 3] = 1.5  # a_1 = 0.22
    target[:, 1, 7] = -INF
    draft[:, 1, 7] = 6.0
    result = verify_flat(**batch)
    assert_matches(batch, result)
    assert result.num_accepted.tolist() == [0] * 12


@pytest.mark.parametrize("given", [True, False])
def test_one_hot_by_request_and_own_draft_temperature(given, small_blocks):
    dtype = torch.bfloat16 if given else torch.float32
    batch = make_chains(V, [3] * 6, dtype) | {"max_draft_tokens": K}
    batch["temperature"] = torch.full((6,), 0.8)
    batch["temperature"][4] = 0
    temperature = torch.tensor([0.0, 0.5, 0.0, 1.2, 0.5, 1.2])
    lse = draft_lse(batch | {"temperature": temperature}) if given else None
    result = verify_flat(**batch, draft_temperature=temperature, draft_lse=lse)
    assert_matches(batch, result, draft_temperature=temperature)


@pytest.mark.parametrize("method", chain_verify.METHODS)
def test_a_request_may_have_no_row_at_all(method):
    arguments = padded(**make_chains(100, [3, 0, 2, 3])) | {"method": method}
    arguments["thresholds"] = torch.full((len(arguments["target_logits"]),), -10.0)
    drafts = {"draft_index": arguments["idx_mapping"], "draft_length": torch.full((4,), 3)}
    expected = reference.verify_chain_padded(**arguments, **drafts)
    for name in ("cu_num_logits", "idx_mapping"):
        arguments[name] = torch.cat((arguments[name], arguments[name][-1:])).int()
    result = chain_verify.verify_chain_padded(**arguments)
    assert result.token_ids[:4].equal(expected.token_ids)
    assert result.num_emitted.tolist() == [*expected.num_emitted.tolist(), 0]
    assert result.token_ids[4].tolist() == [-1] * 4


def test_rows_and_state_by_different_indices_and_a_length_per_request(small_blocks):
    """A request whose drafts are stale (-1) is as one without."""
    batch = make_chains(V, [4] * 5) | {"max_draft_tokens": K}
    batch["temperature"] = torch.tensor([0.7, 1.0, 0.0, 1.0, 0.9])
    # What comes after the second one's length, 0, would be accepted.
    batch["draft_logits"].view(5, 4, V)[1] = batch["target_logits"].view(5, 5, V)[1, :4]
    flat, arguments = verify_flat(**batch, level=2), padded(**batch, draft_lse=draft_lse(batch))
    index, entry = torch.tensor([7, 2, 5, 0, 3]), torch.tensor([4, 1, 0, 3, -1])
    for name in ("temperature", "seeds", "draws"):
        arguments[name] = torch.full((9,), 99, dtype=batch[name].dtype)
        arguments[name][index] = batch[name]
    arguments["draws"] -= 5
    for name in ("draft_logits", "draft_lse"):
        by_request = arguments[name].flip(0)
        arguments[name] = torch.zeros(6, *by_request.shape[1:])
        arguments[name][entry[:4]] = by_request[:4]
    length = torch.full((6,), -7, dtype=torch.int32)
    length[entry[:4]] = torch.tensor([3, 0, 2, 4], dtype=torch.int32)
    arguments |= {"idx_mapping": index.int(), "draft_index": entry, "draft_length": length}
    arguments |= {"level": 2, "draw_offset": 5}
    expected = reference.verify_chain_padded(**arguments)
    assert expected.num_accepted[[1, 4]].tolist() == [0, 0] and expected.num_accepted.any()
    for lse in (arguments["draft_lse"], None):
        result = chain_verify.verify_chain_padded(**arguments | {"draft_lse": lse})
        assert_equal(result, expected)
        assert result.token_ids[3].equal(flat.token_ids[3])
        assert result.target_lse[3].nan_to_num(-1).equal(flat.target_lse[3].nan_to_num(-1))
    # Negative control: without the lengths what follows a draft counts.
    known = {"draft_length": None, "draft_lse": None, "idx_mapping": index}
    result = chain_verify.verify_chain_padded(**arguments | known)
    assert result.num_accepted[1] == 4


# Rows read once: K target rows of 2 bytes; with what else the case needs.
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "rows"),
    [("accepted", 12), ("accepted, no lse", 22), ("rejected", 14), ("greedy", 12), ("one-hot", 12)],
)
def test_every_needed_row_is_read_once(case, rows):
    """Bytes that a verification moves, counted lane by lane."""
    vocab_size, k, requests = 16384, 5, 2
    batch = make_chains(vocab_size, [k] * requests, torch.bfloat16, noise=0.0)
    batch["temperature"] = torch.tensor([1.0, 0.7])
    lse, accepted = draft_lse(batch), [k, k]
    if case == "rejected":
        first = batch["draft_token_ids"][::k]
        batch["target_logits"][:: k + 1].scatter_(1, first[:, None], -INF)
        accepted = [0, 0]
    elif case == "greedy":
        batch["temperature"] = torch.zeros(requests)
        rows_of_draft = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9, 10])
        batch["draft_token_ids"] = batch["target_logits"][rows_of_draft].float().argmax(-1)
    elif case == "one-hot":
        batch["draft_logits"] = None
        batch["draft_token_ids"][::k] = batch["target_logits"][:: k + 1].float().argmin(-1)
        accepted = [0, 0]
    given = None if case in ("accepted, no lse", "one-hot") else lse
    with count_bytes() as counts:
        result = verify_flat(**batch, draft_lse=given)
    assert counts["launches"] == 3 and result.num_accepted.tolist() == accepted
    moved = (counts["loaded"] + counts["stored"]) / (requests * vocab_size)
    # One block is read again to draw; a few hundred numbers a request are left between launches.
    assert rows <= moved < rows + (4 * blocks.BLOCK + 16384) / vocab_size


def test_no_drafts_and_no_requests():
    batch = make_chains(40, [0, 0])
    assert_matches(batch, verify_flat(**batch))
    nothing = make_chains(40, [1])
    for name in nothing.keys() - {"max_draft_tokens"}:
        nothing[name] = nothing[name][:0]
    nothing["cu_num_draft_tokens"] = torch.tensor([0])
    assert verify_flat(**nothing).token_ids.shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_logits": torch.zeros(5, 8, dtype=torch.float64)}, "target_logits must be bf"),
        ({"draft_logits": torch.zeros(3, 2, 8)}, r"draft_logits must have shape \[2, K"),
        ({"draft_logits": torch.zeros(2, 2, 9)}, r"draft_logits \(vocabulary 9"),
        ({"draft_sampled": torch.zeros(5)}, "draft_sampled must be int64 or int32"),
        ({"idx_mapping": torch.arange(3)}, r"idx_mapping must have shape \[2\]"),
        ({"temperature": torch.ones(2).double()}, "temperature must be float32"),
        ({"draft_temperature": torch.ones(2).double()}, "draft_temperature must be float32"),
        ({"seeds": torch.zeros(2, dtype=torch.int32)}, "seeds must be int64"),
        ({"draws": torch.zeros(4, dtype=torch.int64)[::2]}, "draws must be contiguous"),
        ({"draft_lse": torch.zeros(2, 1)}, r"draft_lse must have shape \[2, K"),
        ({"max_draft_tokens": 64}, r"max_draft_tokens must be in \[0, 63\]"),
        ({"method": "greedy"}, "method must be one of block, standard"),
        ({"level": 0}, "level must be"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        chain_verify.verify_chain_padded(**padded(**make_chains(8, [1, 2])) | change)
