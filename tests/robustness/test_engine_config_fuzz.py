"""Mutated cascades given to vLLM: an engine configuration, or one sentence of ours."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cascade_mutations import cascades, sentence_objection, valid_cascades
from support.eagle3_head import write_eagle3_head
from support.engines import configuration_errors
from support.suffix_extra import MISSING

from vllm_hsd.core.exit_head import ExitHead, write_exit_head
from vllm_hsd.core.text_store import collect_texts, write_store

COUNT = 100
VOCABULARY, HIDDEN, LAYERS = 64, 64, 2  # of the tiny target
PREFIX = "UserError: "


@pytest.fixture(scope="module")
def files(family, tmp_path_factory) -> dict[str, str]:
    """What lookup levels read, fit for the tiny target."""
    scratch = tmp_path_factory.mktemp("levels")
    found = {"exit_head": str(scratch / "layer-1")}
    head = ExitHead(1, torch.ones(HIDDEN), torch.ones(VOCABULARY, HIDDEN), 1e-6)
    write_exit_head(head, found["exit_head"])
    found["eagle3"] = write_eagle3_head(family.target, tmp_path_factory.mktemp("head"))
    found["store"] = str(scratch / "store.safetensors")
    write_store(collect_texts([np.arange(VOCABULARY)], VOCABULARY), found["store"])
    return found


def can_be_sent(value: object) -> bool:
    """Whether it reaches the process that makes the configuration."""
    try:
        return bool(pickle.dumps(value))
    except RecursionError:
        return False


def test_vllm_accepts_a_mutation_or_says_one_sentence(family, files):
    valid = valid_cascades(
        family.small, family.mid, files["store"], files["exit_head"], files["eagle3"]
    )
    valid = valid[:-1] if MISSING else valid
    raws = [raw for raw in cascades(valid, seed=0, count=COUNT) if isinstance(raw, dict)]
    raws = [raw for raw in raws if can_be_sent(raw)]
    engines = [
        {"model": family.target, "speculative_config": {"method": "hsd", **raw}} for raw in raws
    ]
    wrong, accepted = [], 0
    for raw, error in zip(raws, configuration_errors(engines), strict=True):
        accepted += error is None
        sentence = error is None or (
            error.startswith(PREFIX) and not sentence_objection(error.removeprefix(PREFIX))
        )
        if not sentence or (any(raw is each for each in valid) and error is not None):
            wrong.append((raw, error))
    assert wrong == []
    assert 0.2 * COUNT <= accepted < 0.8 * COUNT


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def no_header(path: Path) -> None:
    path.write_bytes(bytes(100))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


WEIGHTS = {"cut": cut, "empty": empty, "no header": no_header, "longer": longer}
CONFIGS = {
    "no JSON": "{",
    "binary": "\u0000\u0001",
    "a list": "[1]",
    "empty": "",
    "no model type": "{}",
    "layers of another type": {"num_hidden_layers": "many"},
    "unknown architecture": {"architectures": ["Nonsense"]},
    "no vocabulary": {"vocab_size": -1},
    "heads of another type": {"num_attention_heads": "x"},
}


HEAD_DAMAGES = {**WEIGHTS, "a list": "[1]", "vocabulary": {"vocab_size": VOCABULARY + 1}}


def damage_directory(directory: Path, damage: object) -> None:
    """Apply one of WEIGHTS, or write one of CONFIGS in place of config.json or of its keys."""
    if callable(damage):
        damage(directory / "model.safetensors")
        return
    config = directory / "config.json"
    if isinstance(damage, dict):
        damage = json.dumps({**json.loads(config.read_text()), **damage})
    config.write_text(str(damage))


def test_damaged_drafters_are_reported_with_level_and_file(family, files, tmp_path):
    engines, expected = [], []
    drafters = [
        *(("model", family.small, *damage) for damage in {**WEIGHTS, **CONFIGS}.items()),
        *(("eagle3", files["eagle3"], *damage) for damage in HEAD_DAMAGES.items()),
    ]
    for i, (kind, whole, name, damage) in enumerate(drafters):
        directory = tmp_path / f"{kind}-{name.replace(' ', '-')}"
        shutil.copytree(whole, directory)
        damage_directory(directory, damage)
        broken = {kind: str(directory)}
        key, levels = f"levels[0].{kind}", [broken]
        if i % 2:
            key, levels = f"levels[0].sources[1].{kind}", [{"sources": [{"ngram": {}}, broken]}]
        elif kind == "model":
            key, levels = "levels[1].model", [{"model": family.small, "num_tokens": 2}, broken]
        cascade = {"method": "hsd", "num_speculative_tokens": 6, "levels": levels}
        engines.append({"model": family.target, "speculative_config": cascade})
        expected.append((key, directory.name))
    for (key, name), error in zip(expected, configuration_errors(engines), strict=True):
        assert error and error.startswith(f"{PREFIX}{key}"), f"{key} {name}: {error}"
        assert name in error and sentence_objection(error.removeprefix(PREFIX)) is None, error
