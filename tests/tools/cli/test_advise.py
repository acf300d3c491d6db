"""`vllm-hsd advise`: what it starts with where, and that vLLM takes what it prints."""

import json

import pytest

from vllm_hsd.tools.cli import advise
from vllm_hsd.tools.cli.advise import Situation, advice
from vllm_hsd.tools.cli.doctor import configuration_findings
from vllm_hsd.tools.cli.main import main
from vllm_hsd.tools.dtype import Choice

CASES = [
    (Situation("cpu", 0, False), advise.SUFFIX),
    (Situation("cuda", 0, False), advise.NGRAM),
    (Situation("cpu", 0, True), None),
    (Situation("cpu", 1, True), None),
    (Situation("cuda", 0, True), None),
]


@pytest.mark.parametrize(("situation", "config"), CASES)
def test_what_to_start_with(situation, config):
    assert advice(situation).config == config


@pytest.mark.parametrize(
    "faulty",
    [{"num_nextn_predict_layers": "x"}, {"layer_types": [[1]]}, {"hidden_size": "a"}],
    ids=str,
)
def test_a_model_that_cannot_be_read(faulty, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **faulty}))
    assert main(["advise", "--model", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "cannot be read" in said and said.count("\n") == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_command(dtype, text_family, capsys, monkeypatch):
    monkeypatch.setattr(advise, "choose_dtype", lambda model: Choice(dtype, "it is faster"))
    assert main(["advise", "--model", text_family.target]) == 0
    printed = capsys.readouterr().out
    assert ("--dtype float32 --speculative-config" in printed) == (dtype == "float32")
    assert "Start with:" in printed and f"vllm-hsd bench --model {text_family.target}" in printed
    for config in (advise.SUFFIX, advise.NGRAM):
        valid, *_ = configuration_findings(text_family.target, json.dumps(config), ())
        assert valid.status == "ok"
