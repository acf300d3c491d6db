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


def test_the_command(text_family, capsys):
    assert main(["advise", "--model", text_family.target]) == 0
    printed = capsys.readouterr().out
    assert "Start with:" in printed and f"vllm-hsd bench --model {text_family.target}" in printed
    for config in (advise.NGRAM, advise.STOCK_NGRAM):
        assert configuration_finding(text_family.target, json.dumps(config), ()).status == "ok"
