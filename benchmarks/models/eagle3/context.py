"""What a head loses where it has read the last positions only, and has zeros for all before.

    python -m benchmarks.models.eagle3.context     # needs the shards of `features`

An `eagle3` level that did not draft for a while reads the states that were kept, and nothing else.
Figures are those of `evaluate` on held-out chats; writes context.csv next to the head.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import write_csv
from benchmarks.models.eagle3.evaluate import HEAD, evaluate, read_inputs
from benchmarks.models.eagle3.features import WORK
from vllm_hsd.tools.planner import eagle3_head
from vllm_hsd.tools.planner.eagle3_head import delay

# Positions of the target's states that the head has read before a draft; None: all.
READ = (None, 64, 32, 16, 8)


def attend_to_the_last(read: int, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """As `eagle3_head.attend`, with zeros as keys and values before the last `read` positions."""
    time, back = q.shape[2], len(keys) - 1
    ones = torch.ones(time, time, dtype=torch.bool)
    seen, known = ones.tril(-back), ones.tril(-back).triu(1 - read - back)
    scores = (q @ keys[0].transpose(2, 3)).masked_fill(~known, 0.0)
    # A row that sees nothing belongs to no draft; looking at itself keeps it finite.
    seen[:back] |= torch.eye(time, dtype=torch.bool)[:back]
    columns = [scores.masked_fill(~seen, -torch.inf)]
    shifted = [delay(value, back - m) for m, value in enumerate(values[1:], 1)]
    for m, key in enumerate(keys[1:], 1):
        columns.append((q * delay(key, back - m)).sum(-1, keepdim=True))
    weights = (torch.cat(columns, -1) * q.shape[3] ** -0.5).float().softmax(-1).to(q.dtype)
    out = (weights[..., :time] * known) @ values[0]
    for m, value in enumerate(shifted):
        out = out + weights[..., time + m, None] * value
    return out.transpose(1, 2).flatten(2)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=WORK, help="directory of shards")
    parser.add_argument("--output", type=Path, default=HEAD, help="directory of the CSV")
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs = read_inputs(args.work, HEAD)
    rows = []
    for read in READ:
        attend = partial(attend_to_the_last, read) if read else eagle3_head.attend
        with patch.object(eagle3_head, "attend", attend):
            figures = evaluate(*inputs)
        rows.append({"read": read or "all", "chats": len(inputs.chats), **figures})
        print(rows[-1], flush=True)
    write_csv(args.output / "context.csv", rows)


if __name__ == "__main__":
    main()
