"""Several drawn drafts of a request on vLLM's layout, against the plain rule."""

from functools import partial

import numpy as np
import pytest
import torch
from support.proposal_states import poison_memory

from vllm_hsd.kernels import naive as reference
from vllm_hsd.kernels.drawn_rows import DrawnResult, verify_drawn_rows
from vllm_hsd.kernels.filter_rows import Filters
from vllm_hsd.kernels.tree_verify import MAX_NODES

CHUNK_AND_BLOCK = 32, 16
LEVEL, DRAFTS = 1, 3
assert_equal = partial(torch.testing.assert_close, check_dtype=False)


def make_rows(requests: int, rows: int, length: int, vocabulary: int, seed: int = 0) -> dict:
    """Arguments of the verification; distributions depend on nothing but the last token.

    Requests have rows of the same few tokens, some of them short or empty, and lie in the batch in
    another order than their drafts.
    """
    g = torch.Generator().manual_seed(seed)
    random = np.random.default_rng(seed)
    target, draft = (2 * torch.randn(vocabulary + 1, vocabulary, generator=g) for _ in "td")
    draft[:, 4:] -= 4
    temperature, draft_temperature = torch.rand(2, requests, generator=g) + 0.6
    index = torch.randperm(requests + DRAFTS, generator=g)[:requests]
    chain = torch.full((requests + DRAFTS, length, vocabulary), float("nan"))
    further = torch.full((rows - 1, requests + DRAFTS, length, vocabulary), float("nan"))
    inputs, held = [], torch.zeros(requests, rows, dtype=torch.int32)
    for i in range(requests):
        proposals = reference.probabilities(draft, draft_temperature[i].expand(vocabulary + 1))
        for r in range(rows):
            last, tokens = vocabulary, [0]
            kept = (chain if r == 0 else further[r - 1])[index[i]]
            for t in range(length):
                kept[t] = draft[last]
                last = int(random.choice(vocabulary, p=proposals[last].numpy()))
                tokens.append(last)
            inputs += tokens
            held[i, r] = int(random.integers(0 if r else 1, length + 1)) if i % 3 else length
    roots = torch.arange(len(inputs)) % (length + 1) == 0
    after = torch.tensor(inputs)
    each = rows * (length + 1)
    return {
        "target_logits": target[torch.where(roots, vocabulary, after)],
        "chain_logits": chain,
        "further_logits": further,
        "draft_sampled": after.int(),
        "cu_num_logits": (torch.arange(requests + 1) * each).int(),
        "held": held,
        "draft_index": index,
        "temperature": temperature,
        "draft_temperature": draft_temperature,
        "seeds": torch.randint(-(2**62), 2**62, (requests,), generator=g),
        "draws": torch.randint(0, 2**40, (requests,), generator=g),
    }


def expected(batch: dict, thresholds: torch.Tensor | None = None) -> DrawnResult:
    """What the plain rule makes of each request's rows as a tree, in their order."""
    (requests, rows), length = batch["held"].shape, batch["chain_logits"].shape[1]
    target, temperature = batch["target_logits"], batch["temperature"]
    if thresholds is not None:
        owner = torch.arange(requests).repeat_interleave(batch["cu_num_logits"].diff())
        target = reference.filtered(target, temperature[owner], thresholds)
    root, node = batch["cu_num_logits"][:-1, None].long(), torch.arange(rows * length)
    row, place = node // length, node % length
    held = place < batch["held"][:, row]
    inputs = torch.where(held, root + row * (length + 1) + place + 1, root)
    drawn_from = torch.cat((batch["chain_logits"][None], batch["further_logits"]))
    # Of the nodes' parents; from the last leaf nothing is drawn.
    proposals = drawn_from[:, batch["draft_index"]].transpose(0, 1).flatten(1, 2)
    found = reference.verify_tree(
        target[torch.cat((root, inputs), 1)],
        torch.nn.functional.pad(proposals, (0, 0, 0, 1)),
        torch.where(held, batch["draft_sampled"][inputs], -1),
        torch.where(place > 0, node - 1, -1).expand(requests, -1),
        temperature,
        batch["seeds"],
        batch["draws"],
        level=LEVEL,
        draft_temperature=batch["draft_temperature"],
    )
    winner = found.path.amax(1).clamp(min=0) // length
    token_ids = found.token_ids[:, : length + 1]
    return DrawnResult(token_ids, found.num_accepted, found.num_emitted, winner)


@pytest.mark.every_kernel
@pytest.mark.parametrize("filtered", [False, True], ids=["whole rows", "filtered"])
def test_equals_the_plain_rule(filtered, small_blocks, monkeypatch):
    batch = make_rows(30, 3, 3, 70)
    thresholds = None
    if filtered:
        owner = torch.arange(30).repeat_interleave(12)
        filters = Filters(torch.full((30,), 12).int(), torch.full((30,), 0.95), torch.zeros(30))
        thresholds = reference.row_thresholds(
            batch["target_logits"], batch["temperature"], filters, index=owner
        )
    wanted = expected(batch, thresholds)
    assert len(wanted.winner.unique()) == 3 and (wanted.winner > 0).sum() > 2
    poison_memory(monkeypatch)
    assert_equal(verify_drawn_rows(**batch, level=LEVEL, thresholds=thresholds), wanted)


@pytest.mark.parametrize(("rows", "length"), [(2, 1), (16, 4), (2, 32)])
def test_numbers_of_rows(rows, length, small_blocks):
    batch = make_rows(12, rows, length, 40, seed=3)
    assert_equal(verify_drawn_rows(**batch, level=LEVEL), expected(batch))


def test_lists_of_any_length_and_wider_target_rows(small_blocks):
    """The scheduler has cut the last request's list, and a padded head has further columns."""
    batch = make_rows(4, 3, 3, 70, seed=5)
    batch["held"][3, 1:] = torch.tensor([2, 0])
    batch["cu_num_logits"][4] -= 5
    for name in ("draft_sampled", "target_logits"):
        batch[name] = batch[name][:-5]
    wide = torch.nn.functional.pad(batch["target_logits"], (0, 24), value=9.0)
    wanted = expected(batch)
    batch["target_logits"] = wide[:, :70]
    assert_equal(verify_drawn_rows(**batch, level=LEVEL), wanted)


def test_rows_of_no_distribution_end_their_branches(small_blocks):
    batch = make_rows(20, 3, 3, 70, seed=1)
    batch["target_logits"][1] = float("nan")
    batch["target_logits"][12] = float("nan")
    batch["further_logits"][0, batch["draft_index"][2], 1] = float("nan")
    assert_equal(verify_drawn_rows(**batch, level=LEVEL), expected(batch))


def test_what_does_not_fit_is_refused():
    batch = make_rows(2, 2, 3, 8)
    with pytest.raises(ValueError, match="further_logits must be"):
        verify_drawn_rows(**{**batch, "further_logits": batch["further_logits"][:, :, :2]})
    with pytest.raises(ValueError, match=f"R \\* N at most {MAX_NODES}"):
        verify_drawn_rows(**make_rows(1, 13, 5, 8))
