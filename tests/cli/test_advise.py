"""`vllm-hsd advise`: what it starts with where, and that vLLM takes what it prints."""

import json

import pytest

from vllm_hsd.cli import advise
from vllm_hsd.cli.advise import Situation, advice
from vllm_hsd.cli.doctor import configuration_finding
from vllm_hsd.cli.main import main

CASES = [
    (Situation("cpu", True, 0, False), advise.SUFFIX),
    (Situation("cpu", False, 0, False), advise.NGRAM),
    (Situation("cuda", True, 0, False), advise.STOCK_SUFFIX),
    (Situation("cpu", True, 0, True), None),
]


@pytest.mark.parametrize(("situation", "config"), CASES)
def test_what_to_start_with(situation, config):
    assert advice(situation).config == config


def test_layers_that_draft_come_first():
    config = advice(Situation("cuda", True, 2, True)).config
    assert config == {
        "method": "mtp",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "hierarchical",
    }


def test_the_command(text_family, capsys):
    assert main(["advise", "--model", text_family.target]) == 0
    printed = capsys.readouterr().out
    assert "Start with:" in printed and f"vllm-hsd bench --model {text_family.target}" in printed
    for config in (advise.NGRAM, advise.STOCK_NGRAM):
        assert configuration_finding(text_family.target, json.dumps(config), ()).status == "ok"


def test_a_model_that_is_not_there(capsys):
    assert main(["advise", "--model", "./nowhere"]) == 2
    assert "--model './nowhere' cannot be read" in capsys.readouterr().err
