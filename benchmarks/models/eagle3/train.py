"""Train an EAGLE-3 head on the shards of `features`; the same command goes on where it stopped.

Where the states of a training are lost, `--head` goes on from a published head's weights.

The learning rate stays constant after its warm-up and a running average of the weights is what
gets evaluated and saved, so there is a usable head at any time and no schedule to plan. New
shards are taken in at the next epoch.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.models.eagle3 import FAST_DTYPE
from benchmarks.models.eagle3.batches import (
    Batch,
    epoch_batches,
    held_out_chats,
    read_batch,
    shard,
    shard_names,
)
from benchmarks.models.eagle3.evaluate import evaluate
from benchmarks.models.eagle3.features import WORK
from benchmarks.models.eagle3.head import save_head
from benchmarks.models.eagle3.loss import SoftCrossEntropy
from benchmarks.models.eagle3.start import warm_start
from benchmarks.models.smollm2 import smollm2
from vllm_hsd.tools.planner.eagle3_head import Head, Shape, load_head


@dataclass(frozen=True)
class Recipe:
    """Everything that a training run depends on besides its shards.

    Attributes:
        draft_vocab_size: Tokens the head can propose.
        layers: Auxiliary states it reads, in vLLM's numbering.
        depth: Training-time-test steps once all are on.
        decay: Weight of a step's loss relative to the step before.
        unroll_every: Optimizer steps until one more test step is added.
        batch_tokens: Tokens of a batch, padding included.
        matrix_rate: Muon's learning rate (decoder layer and `fc`).
        vector_rate: AdamW's learning rate (norms).
        warmup: Optimizer steps until both rates are reached.
        fit_chats: Chats for the least-squares fit that the head starts from.
        seed: Of the data order.
    """

    draft_vocab_size: int = 8192
    layers: tuple[int, ...] = (2, 15, 22, 27, 30)
    depth: int = 4
    decay: float = 0.8
    unroll_every: int = 120
    batch_tokens: int = 2048
    matrix_rate: float = 1e-3
    vector_rate: float = 5e-4
    warmup: int = 10
    fit_chats: int = 700
    seed: int = 12


class Training:
    """A head, its running average and its optimizers.

    Args:
        target: LlamaForCausalLM in transformers.
        recipe: What to do.
        draft_tokens: [draft_vocab_size] int64, ascending target ids.
        dtype: Of the matrix products; weights and optimizer states are float32.
    """

    def __init__(
        self, target: torch.nn.Module, recipe: Recipe, draft_tokens: Tensor, dtype: torch.dtype
    ) -> None:
        config = target.config
        shape = Shape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            draft_vocab_size=len(draft_tokens),
            layers=recipe.layers,
            rope_theta=config.rope_parameters["rope_theta"],
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.recipe = recipe
        self.dtype = dtype
        self.head = Head(shape, draft_tokens)
        self.average = Head(shape, draft_tokens)
        self.embedding = target.model.embed_tokens.weight.detach().to(dtype)
        self.rows = target.lm_head.weight.detach()[draft_tokens].to(dtype)
        # The output matrix stays the target's own rows: a small set of chats would be learned by
        # heart there.
        self.head.lm_head.requires_grad_(False)
        trained = [p for p in self.head.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2]
        others = [p for p in trained if p.ndim == 1]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, recipe.matrix_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, recipe.vector_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.step = 0

    def depth(self) -> int:
        """Test steps of the next optimizer step."""
        return min(self.recipe.depth, 1 + self.step // self.recipe.unroll_every)

    def losses(self, batch: Batch, picked: Tensor) -> list[Tensor]:
        """Mean soft cross entropy per position, for each test step.

        Args:
            batch: Chats.
            picked: [layers] which of the batch's states the head reads.
        """
        depth = self.depth()
        p = (F.linear(batch.final.to(self.dtype), self.rows).float() - batch.lse[:, None]).exp_()
        p = p.to(self.dtype)
        position = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)[batch.valid]
        embeds = F.embedding(batch.tokens, self.embedding)
        states = batch.states[:, :, picked]
        with torch.autocast("cpu", torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            outputs = self.head(embeds, states.to(self.dtype), depth)
        losses = []
        for j, output in enumerate(outputs):
            weights = (position >= j).float()
            weights /= weights.sum()
            losses.append(
                SoftCrossEntropy.apply(output[batch.valid], self.head.lm_head.weight, p, weights)
            )
        return losses

    def update(self, batch: Batch, picked: Tensor) -> list[float]:
        """One optimizer step; the losses of its test steps."""
        recipe = self.recipe
        losses = self.losses(batch, picked)
        torch.stack([recipe.decay**j * loss for j, loss in enumerate(losses)]).sum().backward()
        rates = (recipe.matrix_rate, recipe.vector_rate)
        for optimizer, rate in zip(self.optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (self.step + 1) / recipe.warmup)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        # A window of a tenth of the run, and of 400 steps at most.
        share = max(10 / (10 + self.step), 1 / 400)
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(p, share)
        return [loss.item() for loss in losses]

    def save(self, path: Path, place: dict[str, object]) -> None:
        """Writes weights, average, optimizer states and `place` (where the data stand)."""
        tensors = {f"head.{k}": v for k, v in self.head.state_dict().items()}
        tensors |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        for i, optimizer in enumerate(self.optimizers):
            for j, p in enumerate(optimizer.param_groups[0]["params"]):
                for k, v in optimizer.state[p].items():
                    tensors[f"optimizer.{i}.{j}.{k}"] = v
        tensors["draft_tokens"] = self.head.draft_tokens
        place = place | {"step": self.step}
        scratch = path.with_suffix(".partial")
        save_file(
            {k: v.contiguous() for k, v in tensors.items()},
            scratch,
            metadata={"place": json.dumps(place)},
        )
        os.replace(scratch, path)

    def load(self, path: Path) -> dict:
        """Reads what `save` wrote; returns the place."""
        with safe_open(path, "pt") as file:
            tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
            place = json.loads(file.metadata()["place"])
        for prefix, head in (("head.", self.head), ("average.", self.average)):
            head.load_state_dict(
                {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            )
        for i, optimizer in enumerate(self.optimizers):
            for j, p in enumerate(optimizer.param_groups[0]["params"]):
                prefix = f"optimizer.{i}.{j}."
                optimizer.state[p] = {
                    k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)
                }
        self.step = place["step"]
        return place


def choose_draft_tokens(directory: Path, names: list[str], size: int) -> Tensor:
    """The tokens that the target gives most probability over all answers; ascending ids.

    Expected counts see the many rare tokens that a small sample of texts does not hold.
    """
    mass = torch.stack([shard(directory / n).mass for n in names]).sum(0)
    return mass.topk(size).indices.sort().values


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, help="transformers directory; SmolLM2 if left out")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of shards and states")
    parser.add_argument("--head", type=Path, help="head and curve that a new training goes on from")
    parser.add_argument("--steps", type=int, default=100_000, help="optimizer steps in all")
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=25)
    parser.add_argument("--evaluation-chats", type=int, default=24)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    recipe = Recipe()
    shards, state = args.work / "features", args.work / "state.safetensors"
    names = shard_names(shards)
    target = AutoModelForCausalLM.from_pretrained(args.target or smollm2(), dtype=torch.float32)
    if state.exists():
        with safe_open(state, "pt") as file:
            draft_tokens = file.get_tensor("draft_tokens")
    elif args.head:
        draft_tokens = load_head(args.head).draft_tokens
    else:
        draft_tokens = choose_draft_tokens(shards, names, recipe.draft_vocab_size)
    stored = shard(shards / names[0]).layers
    picked = torch.tensor([stored.index(i) for i in recipe.layers])
    training = Training(target, recipe, draft_tokens, FAST_DTYPE)
    place: dict = {"epoch": 0, "batch": 0, "names": names, "seconds": 0.0, "tokens": 0}
    if state.exists():
        place = training.load(state)
    elif args.head:
        weights = load_head(args.head).state_dict()
        training.head.load_state_dict(weights)
        training.average.load_state_dict(weights)
        curve = (args.head / "curve.csv").read_text()
        (args.work / "curve.csv").write_text(curve)
        *_, last = csv.DictReader(curve.splitlines())
        training.step = int(last["step"])
        place |= {"seconds": float(last["cpu_seconds"]), "tokens": int(last["tokens"])}
    else:
        batches = epoch_batches(shards, names, recipe.seed, 0, recipe.batch_tokens)
        chosen = [c for batch in batches for c in batch][: recipe.fit_chats]
        chats = [shard(shards / name).chat(i) for name, i in chosen]
        warm_start(training.head, target, chats, picked, training.dtype)
        training.average.load_state_dict(training.head.state_dict())
        save_head(training.average, args.work / "head")
    del target
    while training.step < args.steps:
        batches = epoch_batches(
            shards, place["names"], recipe.seed, place["epoch"], recipe.batch_tokens
        )
        for index in range(place["batch"], len(batches)):
            start = time.process_time()
            batch = read_batch(shards, batches[index])
            losses = training.update(batch, picked)
            place["seconds"] += time.process_time() - start
            place["tokens"] += int(batch.valid.sum())
            place["batch"] = index + 1
            if training.step % 5 == 0:
                text = " ".join(f"{x:.3f}" for x in losses)
                print(
                    f"step {training.step} epoch {place['epoch']} "
                    f"tokens {place['tokens']} cpu {place['seconds']:.0f} s loss {text}",
                    flush=True,
                )
            if training.step % args.save_every == 0:
                training.save(state, place)
            if training.step % args.evaluate_every == 0:
                chats = held_out_chats(shards, place["names"])[: args.evaluation_chats]
                report(training, args.work, chats, picked, place)
            if training.step >= args.steps:
                break
        else:
            place |= {"epoch": place["epoch"] + 1, "batch": 0, "names": shard_names(shards)}
    training.save(state, place)


def report(training: Training, work: Path, chats: list, picked: Tensor, place: dict) -> None:
    """Evaluates the averaged head, appends a row to the curve and saves the head."""
    save_head(training.average, work / "head")
    figures = evaluate(training.average, training.embedding, training.rows, chats, picked)
    row = {
        "step": training.step,
        "epoch": place["epoch"],
        "tokens": place["tokens"],
        "cpu_seconds": round(place["seconds"]),
        **figures,
    }
    path = work / "curve.csv"
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(" ".join(f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
