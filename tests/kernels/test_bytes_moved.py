"""Bytes that a verification moves, counted lane by lane, against the rows it has to read."""

import pytest
import torch
from support.interpreter import count_bytes
from support.kernel_batches import draft_lse, make_chains, verify_flat

from vllm_hsd.kernels.blocks import BLOCK

V, K, BATCH = 16384, 5, 2


def bytes_per_entry(batch, **options):
    with count_bytes() as counts:
        result = verify_flat(**batch, **options)
    assert counts["launches"] == 3
    return (counts["loaded"] + counts["stored"]) / (BATCH * V), result.num_accepted.tolist()


def whole_draft_accepted():
    batch = make_chains(V, [K] * BATCH, torch.bfloat16, noise=0.0)
    batch["temperature"] = torch.tensor([1.0, 0.7])
    return batch


# Rows read once: K target rows of 2 bytes; with what else the case needs.
@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("case", "rows"),
    [("accepted", 12), ("accepted, no lse", 22), ("rejected", 14), ("greedy", 12), ("one-hot", 12)],
)
def test_every_needed_row_is_read_once(case, rows):
    batch = whole_draft_accepted()
    lse = draft_lse(batch)
    accepted = [K, K]
    if case == "rejected":
        first = batch["draft_token_ids"][::K]
        batch["target_logits"][:: K + 1].scatter_(1, first[:, None], float("-inf"))
        accepted = [0, 0]
    elif case == "greedy":
        batch["temperature"] = torch.zeros(BATCH)
        rows_of_draft = torch.tensor([0, 1, 2, 3, 4, 6, 7, 8, 9, 10])
        batch["draft_token_ids"] = batch["target_logits"][rows_of_draft].float().argmax(-1)
    elif case == "one-hot":
        batch["draft_logits"] = None
        batch["draft_token_ids"][::K] = batch["target_logits"][:: K + 1].float().argmin(-1)
        accepted = [0, 0]
    given = None if case in ("accepted, no lse", "one-hot") else lse
    moved, got = bytes_per_entry(batch, draft_lse=given)
    assert got == accepted
    # One block is read again to draw; a few hundred numbers a request are left between launches.
    assert rows <= moved < rows + (4 * BLOCK + 16384) / V
