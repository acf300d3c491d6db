"""Hidden states and output distributions of the target on chats, kept in shards on disk."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.models.eagle3 import FAST_DTYPE
from benchmarks.models.eagle3.chats import Chat, read_chats
from benchmarks.models.smollm2 import smollm2
from vllm_hsd.tools.planner.eagle3_head import target_states

WORK = Path(__file__).resolve().parents[3] / "results" / "models" / "smollm2-eagle3-training"
LAYERS = (2, 8, 15, 22, 27, 30)  # kept for SmolLM2; a recipe reads some of them
CHATS = 128  # of a shard
BATCH_TOKENS = 2048


def batches_by_length(lengths: list[int], limit: int) -> Iterator[list[int]]:
    """Indices grouped so that a group padded to its longest holds at most `limit` tokens."""
    group: list[int] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        longest = max(longest, lengths[i])
        if group and longest * (len(group) + 1) > limit:
            yield group
            group, longest = [], lengths[i]
        group.append(i)
    if group:
        yield group


@torch.inference_mode()
def write_shard(
    path: Path, model: torch.nn.Module, chats: list[Chat], layers: tuple[int, ...], limit: int
) -> None:
    """Writes the states of `chats`; the shard appears only when it is complete."""
    lengths = [len(c.tokens) for c in chats]
    parts: list[dict[str, Tensor]] = [{} for _ in chats]
    weight = model.lm_head.weight
    mass = torch.zeros(weight.shape[0])
    for group in batches_by_length(lengths, limit):
        tokens = torch.zeros(len(group), max(lengths[i] for i in group), dtype=torch.int64)
        for row, i in enumerate(group):
            tokens[row, : lengths[i]] = torch.tensor(chats[i].tokens)
        states, final = target_states(model, tokens, layers)
        for row, i in enumerate(group):
            n = lengths[i]
            logits = torch.nn.functional.linear(final[row, :n], weight).float()
            lse = logits.logsumexp(-1)
            start = len(chats[i].prompt) - 1
            mass += (logits[start:] - lse[start:, None]).exp_().sum(0)
            parts[i] = {
                "states": states[row, :n].bfloat16(),
                "final": final[row, :n].bfloat16(),
                "lse": lse,
                "greedy": logits.argmax(-1).int(),
            }
    merged = {k: torch.cat([p[k] for p in parts]) for k in parts[0]}
    merged["tokens"] = torch.cat([torch.tensor(c.tokens, dtype=torch.int32) for c in chats])
    merged["lengths"] = torch.tensor(lengths, dtype=torch.int32)
    merged["prompt_lengths"] = torch.tensor([len(c.prompt) for c in chats], dtype=torch.int32)
    merged["temperatures"] = torch.tensor([c.temperature for c in chats])
    merged["held_out"] = torch.tensor([c.held_out for c in chats])
    merged["mass"] = mass
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    save_file(merged, scratch, metadata={"layers": json.dumps(layers)})
    os.replace(scratch, path)


@dataclass(frozen=True)
class Features:
    """Target states of one chat of `time` tokens.

    Attributes:
        tokens: [time] int64.
        states: [time, layers, hidden] bfloat16, auxiliary states.
        final: [time, hidden] bfloat16, the normed state that the output matrix reads.
        lse: [time] float32, log-sum-exp of the logits over the whole vocabulary.
        greedy: [time] int64, the target's most probable next token.
        prompt_length: Tokens before the answer.
        temperature: At which the answer was sampled.
    """

    tokens: Tensor
    states: Tensor
    final: Tensor
    lse: Tensor
    greedy: Tensor
    prompt_length: int
    temperature: float


class Shard:
    """Read access to one shard; the states stay on disk until a chat is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, "pt")
        self.layers = tuple(json.loads(self._file.metadata()["layers"]))
        get = self._file.get_tensor
        self.lengths: list[int] = get("lengths").tolist()
        self.held_out: list[bool] = get("held_out").tolist()
        self.temperatures: list[float] = get("temperatures").tolist()
        self.mass = get("mass")
        self._prompts = get("prompt_lengths").tolist()
        self._starts = [0, *torch.tensor(self.lengths).cumsum(0).tolist()]
        self._slices = {
            k: self._file.get_slice(k) for k in ("tokens", "states", "final", "lse", "greedy")
        }

    def chat(self, index: int) -> Features:
        """States of the chat at `index`."""
        a, b = self._starts[index], self._starts[index + 1]
        part = {k: v[a:b] for k, v in self._slices.items()}
        return Features(
            tokens=part["tokens"].long(),
            states=part["states"],
            final=part["final"],
            lse=part["lse"],
            greedy=part["greedy"].long(),
            prompt_length=self._prompts[index],
            temperature=self.temperatures[index],
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, help="transformers directory; SmolLM2 if left out")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of chats and shards")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.target or smollm2(), dtype=FAST_DTYPE)
    for source in sorted((args.work / "chats").glob("*.jsonl.gz")):
        chats = read_chats(source)
        for first in range(0, len(chats), CHATS):
            name = f"{source.name.removesuffix('.jsonl.gz')}-{first // CHATS:04d}.safetensors"
            path = args.work / "features" / name
            if not path.exists():
                start = time.perf_counter()
                part = chats[first : first + CHATS]
                write_shard(path, model, part, LAYERS, BATCH_TOKENS)
                rate = sum(len(c.tokens) for c in part) / (time.perf_counter() - start)
                print(f"{name}: {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
