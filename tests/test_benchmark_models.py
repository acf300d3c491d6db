"""The trained tiny models in benchmarks/models and their zero-padded target."""

import csv
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.models.zero_pad import intermediate_size_for, zero_pad

MODELS = Path(__file__).parents[1] / "benchmarks" / "models"
PARAMETERS = {"target": (4e6, 6e6), "mid": (0.8e6, 1.3e6), "small": (0.2e6, 0.4e6)}
TEXT = 'def read_lines(path):\n    """Return the lines of a file as a list."""\n    with open(path'


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    return {name: AutoModelForCausalLM.from_pretrained(MODELS / name) for name in PARAMETERS}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "target")


def test_parameter_counts_and_dtype(models):
    for name, (low, high) in PARAMETERS.items():
        assert low < models[name].num_parameters() < high
        # Weights are stored in float16; config.json makes the loader widen them.
        assert models[name].dtype == torch.float32


def test_total_sizes_are_below_20_and_25_megabytes():
    files = [p for p in MODELS.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    head = [p for p in files if "smollm2-eagle3" in p.parts]
    assert sum(p.stat().st_size for p in head) < 25e6
    assert sum(p.stat().st_size for p in set(files) - set(head)) < 20e6


def test_one_tokenizer_for_all(models, tokenizer):
    for name, model in models.items():
        own = AutoTokenizer.from_pretrained(MODELS / name)
        assert own.get_vocab() == tokenizer.get_vocab()
        assert model.config.vocab_size == len(tokenizer)
        assert model.config.eos_token_id == own.eos_token_id == model.generation_config.eos_token_id
    assert tokenizer.decode(tokenizer(TEXT + "\t\u00e9\u4e2d").input_ids) == TEXT + "\t\u00e9\u4e2d"


def test_prompts_leave_room_for_an_answer(tokenizer):
    lines = (MODELS / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(set(prompts)) == 40
    assert all(0 < len(tokenizer(p).input_ids) <= 128 for p in prompts)


def test_published_overlaps_are_ordered():
    rows = list(csv.DictReader((MODELS / "overlaps.csv").open()))
    assert len(rows) == 6
    for contexts in {row["contexts"] for row in rows}:
        found = {(r["verifier"], r["drafter"]): r for r in rows if r["contexts"] == contexts}
        overlap = {pair: float(row["overlap"]) for pair, row in found.items()}
        assert 0.4 < overlap["target", "small"] < overlap["target", "mid"] < 0.95
        # Total variation is a metric: the three overlaps obey its triangle inequality.
        tv = {pair: 1 - value for pair, value in overlap.items()}
        assert tv["target", "small"] <= tv["target", "mid"] + tv["mid", "small"]
        assert all(0.3 < float(row["argmax_agreement"]) < 1 for row in rows)


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


def test_padding_is_built_once_and_again_for_another_size(tmp_path):
    out = zero_pad(MODELS / "small", tmp_path / "wide", 640)
    built = (out / "model.safetensors").stat().st_mtime_ns
    zero_pad(MODELS / "small", out, 640)
    assert (out / "model.safetensors").stat().st_mtime_ns == built
    zero_pad(MODELS / "small", out, 704)
    assert json.loads((out / "config.json").read_text())["intermediate_size"] == 704


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
