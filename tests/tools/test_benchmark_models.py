"""The trained tiny models in benchmarks/models and their zero-padded target."""

import csv
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models.zero_pad import intermediate_size_for, zero_pad

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"
TEXT = 'def read_lines(path):\n    """Return the lines of a file as a list."""\n    with open(path'


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    return {
        name: AutoModelForCausalLM.from_pretrained(MODELS / name)
        for name in ("target", "mid", "small")
    }


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "target")


@torch.no_grad()
def test_published_overlaps_hold_on_text_sampled_now(models, tokenizer):
    """A weight file that does not belong to overlaps.csv fails."""
    torch.manual_seed(1)
    ids = tokenizer(TEXT, return_tensors="pt")
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


@torch.no_grad()
def test_a_zero_padded_target_is_the_same_function(models, tokenizer, tmp_path):
    size = intermediate_size_for(MODELS / "target", 20e6)
    out = zero_pad(MODELS / "target", tmp_path / "wide", size)
    wide = AutoModelForCausalLM.from_pretrained(out)
    assert wide.num_parameters() == pytest.approx(20e6, rel=0.01)
    ids = tokenizer(TEXT, return_tensors="pt")
    want, have = models["target"](**ids).logits, wide(**ids).logits
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    greedy = dict(do_sample=False, max_new_tokens=32)
    assert torch.equal(wide.generate(**ids, **greedy), models["target"].generate(**ids, **greedy))


def test_padding_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(ValueError, match="intermediate_size=64 is below"):
        zero_pad(MODELS / "small", tmp_path / "wide", 64)
    with pytest.raises(ValueError, match="params=1000 is below"):
        intermediate_size_for(MODELS / "small", 1000)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(ValueError, match="holds other files"):
        zero_pad(MODELS / "small", tmp_path / "mine", 640)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
