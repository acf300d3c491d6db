"""Batches of chats from the shards, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.models.eagle3.features import Features, Shard, batches_by_length

WINDOW = 256  # chats that are sorted by length together


@dataclass(frozen=True)
class Batch:
    """Chats side by side, padded at the end; position s pairs state s with token s + 1.

    Attributes:
        tokens: [batch, time] int64, the token after each position.
        states: [batch, time, layers, hidden] bfloat16.
        valid: [batch, time] bool, not padding.
        final: [rows, hidden] bfloat16, for each valid position the target's normed state one
            position on: its output distribution is what the head learns there.
        lse: [rows] float32, log-sum-exp of those logits.
        greedy: [rows] int64, argmax of those logits.
    """

    tokens: Tensor
    states: Tensor
    valid: Tensor
    final: Tensor
    lse: Tensor
    greedy: Tensor


def collate(chats: list[Features]) -> Batch:
    """A batch of the chats' target states."""
    time = max(len(c.tokens) for c in chats) - 1
    _, layers, hidden = chats[0].states.shape
    tokens = torch.zeros(len(chats), time, dtype=torch.int64)
    states = torch.zeros(len(chats), time, layers, hidden, dtype=torch.bfloat16)
    valid = torch.zeros(len(chats), time, dtype=torch.bool)
    for row, chat in enumerate(chats):
        n = len(chat.tokens) - 1
        tokens[row, :n] = chat.tokens[1:]
        states[row, :n] = chat.states[:-1]
        valid[row, :n] = True
    return Batch(
        tokens,
        states,
        valid,
        torch.cat([c.final[1:] for c in chats]),
        torch.cat([c.lse[1:] for c in chats]),
        torch.cat([c.greedy[1:] for c in chats]),
    )


@lru_cache(maxsize=1024)
def shard(path: Path) -> Shard:
    """The open shard at `path`."""
    return Shard(path)


def shard_names(directory: Path) -> list[str]:
    """Names of the complete shards of a directory."""
    return sorted(p.name for p in directory.glob("*.safetensors"))


def epoch_batches(
    directory: Path, names: list[str], seed: int, epoch: int, limit: int
) -> list[list[tuple[str, int]]]:
    """The epoch's batches of training chats, each a list of (shard, index).

    A batch padded to its longest chat holds at most `limit` tokens.
    """
    chats = [
        (name, i, length)
        for name in names
        for i, length in enumerate(shard(directory / name).lengths)
        if not shard(directory / name).held_out[i]
    ]
    order = random.Random(seed * 1_000_003 + epoch)
    order.shuffle(chats)
    batches = []
    for a in range(0, len(chats), WINDOW):
        window = chats[a : a + WINDOW]
        for group in batches_by_length([c[2] for c in window], limit):
            batches.append([window[i][:2] for i in group])
    order.shuffle(batches)
    return batches


def read_batch(directory: Path, chats: list[tuple[str, int]]) -> Batch:
    """The target states of a batch."""
    return collate([shard(directory / name).chat(i) for name, i in chats])


def held_out_chats(directory: Path, names: list[str]) -> list[Features]:
    """Chats that are never trained on."""
    return [
        shard(directory / name).chat(i)
        for name in names
        for i, held in enumerate(shard(directory / name).held_out)
        if held
    ]
