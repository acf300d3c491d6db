"""How well a head drafts for its target on chats that it never saw."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import plot
from benchmarks.models.eagle3 import FAST_DTYPE
from benchmarks.models.eagle3.batches import collate, held_out_chats, shard, shard_names
from benchmarks.models.eagle3.features import WORK, Features
from benchmarks.models.smollm2 import smollm2
from vllm_hsd.tools.planner.eagle3_head import Head, load_head

HEAD = Path(__file__).resolve().parents[1] / "smollm2-eagle3"

DEPTH = 5


@torch.inference_mode()
def evaluate(
    head: Head, embedding: Tensor, rows: Tensor, chats: list[Features], picked: Tensor
) -> dict[str, float]:
    """Figures over the answers of the chats, draft positions 1 to `DEPTH`.

    Args:
        head: To judge.
        embedding: [vocab, hidden] of the target; its dtype is that of the matrix products.
        rows: [draft_vocab, hidden], the target's output matrix at the draft tokens.
        chats: Held out.
        picked: [layers] which of the stored states the head reads.

    Returns:
        overlap_j: mean of sum_v min(target, head) at temperature 1 over all answers, the j - 1
        tokens before taken from the chat. agreement_j: on greedy answers, how often the head's
        most probable token is the target's, among the drafts whose j - 1 tokens before were.
        greedy_length: mean accepted tokens of a greedy draft of `DEPTH` on greedy answers.
    """
    overlaps = torch.zeros(DEPTH)
    right = torch.zeros(DEPTH)
    tried = torch.zeros(DEPTH)
    positions = torch.zeros(DEPTH)
    kind = embedding.dtype
    for chat in chats:
        batch = collate([chat])
        embeds = F.embedding(batch.tokens, embedding)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.bfloat16):
            outputs = head(embeds, batch.states[:, :, picked].to(kind), DEPTH)
        p = (F.linear(batch.final.to(kind), rows).float() - batch.lse[:, None]).exp_()
        # Row s predicts token s + 2. The target itself samples the first token of the answer.
        first = chat.prompt_length - 1
        time = len(p)
        matches = []
        for j, output in enumerate(outputs):
            logits = F.linear(output[0], head.lm_head.weight.to(output.dtype)).float()
            q = logits.softmax(-1)
            overlap = torch.minimum(p, q).sum(-1)
            kept = overlap[first + j :]
            overlaps[j] += kept.sum()
            positions[j] += len(kept)
            matches.append(head.draft_tokens[logits.argmax(-1)] == batch.greedy)
        if chat.temperature == 0:
            alive = torch.ones(max(time - first - (DEPTH - 1), 0), dtype=torch.bool)
            for j, match in enumerate(matches):
                tried[j] += alive.sum()
                alive = alive & match[first + j : first + j + len(alive)]
                right[j] += alive.sum()
    figures = {f"overlap_{j + 1}": (overlaps / positions)[j].item() for j in range(DEPTH)}
    figures |= {f"agreement_{j + 1}": (right / tried)[j].item() for j in range(DEPTH)}
    figures["greedy_length"] = (right.sum() / tried[0]).item()
    return {k: round(v, 4) for k, v in figures.items()}


def plot_curve(path: Path) -> None:
    """Draws the evaluations of a training run, `path` (CSV), next to it as PNG."""
    with path.open() as file:
        rows = [
            {"thousand tokens": int(row["tokens"]) / 1000, "draft token": j, "kind": kind}
            | {"share": float(row[f"{kind}_{j}"])}
            for row in csv.DictReader(file)
            for kind in ("agreement", "overlap")
            for j in range(1, 4)
        ]
    plot.lines(
        rows,
        path.with_suffix(".png"),
        x="thousand tokens",
        measures={"share": "share"},
        line="draft token",
        panel="kind",
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, help="transformers directory; SmolLM2 if left out")
    parser.add_argument("--work", type=Path, default=WORK, help="directory of shards and curve")
    parser.add_argument("--head", type=Path, default=HEAD, help="head to judge")
    parser.add_argument(
        "--output", type=Path, default=HEAD, help="directory of the CSVs and the PNG"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    shards = args.work / "features"
    names = shard_names(shards)
    stored = shard(shards / names[0]).layers
    head = load_head(args.head)
    model = AutoModelForCausalLM.from_pretrained(args.target or smollm2(), dtype=FAST_DTYPE)
    chats = held_out_chats(shards, names)
    figures = evaluate(
        head,
        model.model.embed_tokens.weight.detach(),
        model.lm_head.weight.detach()[head.draft_tokens],
        chats,
        torch.tensor([stored.index(i) for i in head.shape.layers]),
    )
    with (args.output / "evaluation.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["draft_token", "agreement", "overlap"])
        for j in range(1, DEPTH + 1):
            writer.writerow([j, figures[f"agreement_{j}"], figures[f"overlap_{j}"]])
    greedy = [c for c in chats if c.temperature == 0]
    answers = [sum(len(c.tokens) - c.prompt_length for c in group) for group in (chats, greedy)]
    print(f"{len(chats)} chats, {answers[0]} answer tokens, {answers[1]} of them greedy")
    print(" ".join(f"{k} {v}" for k, v in figures.items()))
    curve = args.work / "curve.csv"
    if curve.exists():
        (args.output / "curve.csv").write_bytes(curve.read_bytes())
        plot_curve(args.output / "curve.csv")


if __name__ == "__main__":
    main()
