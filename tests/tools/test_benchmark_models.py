"""The trained tiny models in benchmarks/models."""

import csv

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import MODELS

TEXT = 'def read_lines(path):\n    """Return the lines of a file as a list."""\n    with open(path'


@torch.no_grad()
def test_published_overlaps_hold_on_text_sampled_now():
    """A weight file that does not belong to overlaps.csv fails."""
    torch.set_num_threads(1)
    names = ("target", "mid", "small")
    models = {name: AutoModelForCausalLM.from_pretrained(MODELS / name) for name in names}
    torch.manual_seed(1)
    ids = AutoTokenizer.from_pretrained(MODELS / "target")(TEXT, return_tensors="pt")
    first = ids.input_ids.shape[1]
    text = models["target"].generate(
        **ids, do_sample=True, top_k=0, max_new_tokens=64, min_new_tokens=64, num_return_sequences=8
    )
    probs = {n: m(text[:, :-1]).logits[:, first - 1 :].softmax(-1) for n, m in models.items()}
    rows = csv.DictReader((MODELS / "overlaps.csv").open())
    for row in rows:
        if row["contexts"] == "sampled from target":
            pair = probs[row["verifier"]], probs[row["drafter"]]
            now = torch.minimum(*pair).sum(-1).mean().item()
            assert now == pytest.approx(float(row["overlap"]), abs=0.12)
