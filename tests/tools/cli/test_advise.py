"""`vllm-hsd advise`: what it starts with where, and that vLLM takes what it prints."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
from support.damage import change_config, damaged_copy
from support.stock_heads import write_mtp_target

from vllm_hsd.tools.cli import advise
from vllm_hsd.tools.cli.advise import Situation, advice, target_of
from vllm_hsd.tools.cli.doctor import configuration_findings
from vllm_hsd.tools.cli.main import main
from vllm_hsd.tools.dtype import Choice

MTP = {"method": "mtp", "num_speculative_tokens": 1}
DSPARK = {"method": "dspark", "num_speculative_tokens": 7}
CASES = [
    (Situation("cpu", None, False), advise.SUFFIX),
    (Situation("cuda", None, False), advise.NGRAM),
    (Situation("cpu", None, True), None),
    (Situation("cpu", MTP, True), None),
    (Situation("cuda", None, True), None),
    (Situation("cpu", MTP, False), {**MTP, "rejection_sample_method": "hierarchical"}),
    (Situation("cuda", MTP, True), MTP),
    (Situation("cuda", DSPARK, False), DSPARK),
    (Situation("cpu", DSPARK, False), advise.SUFFIX),
]


@pytest.mark.parametrize(("situation", "config"), CASES)
def test_what_to_start_with(situation, config):
    assert advice(situation).config == config


SPECULATOR = {
    "transformer_layer_config": {"model_type": "llama"},
    "speculators_model_type": "eagle3",
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/target"},
    },
}


def test_the_drafter_that_a_checkpoint_brings(text_family, tmp_path):
    def written(name, **changes):
        return damaged_copy(text_family.target, tmp_path / name, change_config(**changes))

    assert target_of(text_family.target) == (text_family.target, None)
    mtp = write_mtp_target(text_family.target, tmp_path / "mtp")
    assert target_of(mtp) == (mtp, MTP)
    stages = written("dspark", dspark_block_size=7)
    assert target_of(stages) == (stages, DSPARK)
    head = written("head", **SPECULATOR)
    eagle3 = {"method": "eagle3", "num_speculative_tokens": 3, "model": head}
    assert target_of(head) == ("some/target", eagle3)


KIMI = {"kda_layers": [1], "full_attn_layers": [2]}


@pytest.mark.parametrize(
    ("config", "recurrent"),
    [
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 2}, False),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]}, True),
        ({"model_type": "kimi_linear", "linear_attn_config": KIMI}, True),
        ({"model_type": "llama"}, False),
    ],
    ids=str,
)
def test_members_of_a_family_with_and_without_a_state(config, recurrent, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **config}))
    assert advise.situation_of(str(tmp_path), None).recurrent == recurrent


def test_what_is_said_of_a_model_with_layers_that_draft(text_family, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(advise, "choose_dtype", lambda model: Choice("float32", "it is faster"))
    mtp = write_mtp_target(text_family.target, tmp_path / "mtp")
    assert main(["advise", "--model", mtp]) == 0
    printed = capsys.readouterr().out
    assert "serves as method 'mtp'" in printed
    assert json.dumps({**MTP, "rejection_sample_method": "hierarchical"}) in printed
    monkeypatch.setattr(advise, "situation_of", lambda *_: Situation("cuda", DSPARK, True))
    assert main(["advise", "--model", mtp]) == 0
    printed = capsys.readouterr().out
    assert '"enable_adaptive_verification": true' in printed
    assert "dspark: known fault of vLLM with `enable_adaptive_verification`" in printed
    assert printed.count("vllm#54360") == 1


FAULTY = {"model_type": "deepseek_v3", "architectures": ["X"]}


@pytest.mark.parametrize(
    "faulty",
    [{**FAULTY, "num_nextn_predict_layers": "x"}, {"layer_types": [[1]]}, {"hidden_size": "a"}],
    ids=str,
)
def test_a_model_that_cannot_be_read(faulty, tmp_path, capsys, monkeypatch):
    # vLLM's own lines about a configuration, as a new process logs them.
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [handler])
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **faulty}))
    assert main(["advise", "--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "cannot be read" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("dtype", "free", "options"),
    [
        ("float32", 95, " --dtype float32 --gpu-memory-utilization 0.90"),
        ("bfloat16", 40, " --dtype bfloat16 --gpu-memory-utilization 0.35"),
    ],
)
def test_the_command(dtype, free, options, text_family, capsys, monkeypatch):
    memory = SimpleNamespace(available=free, total=100)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(advise, "choose_dtype", lambda model: Choice(dtype, "it is faster"))
    assert main(["advise", "--model", text_family.target]) == 0
    printed = capsys.readouterr().out
    assert f"{text_family.target}{options} --speculative-config" in printed
    assert "Start with:" in printed and f"vllm-hsd bench --model {text_family.target}" in printed
    for config in (advise.SUFFIX, advise.NGRAM):
        valid, *_ = configuration_findings(text_family.target, json.dumps(config), ())
        assert valid.status == "ok"


def test_a_vllm_that_does_not_import_is_one_sentence(text_family, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.config.speculative", None)
    assert main(["advise", "--model", text_family.target]) == 2
    said = capsys.readouterr().err
    assert "`vllm-hsd doctor`" in said and said.count("\n") == 1
