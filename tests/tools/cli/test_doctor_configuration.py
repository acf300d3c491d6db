"""`vllm-hsd doctor` on the user's own models: one run names everything that would not work."""

import json
import re
import sys

import numpy as np

from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.tools.cli import doctor
from vllm_hsd.tools.cli import main as cli

FAULTS = (
    "set pipeline_parallel_size to 1",
    r"bigram.* built for 5 tokens and the target has 64",
    r"levels\[1\].early_exit is 9, but the target has 2 layers",
    r"levels\[1\].early_exit .* LoRA adapters: remove the level or enable_lora\.",
    r"levels\[2\].model .* vocabulary of 5 tokens",
)


def test_every_fault_is_named_once(family, small_vocabulary, tmp_path, capsys):
    """Each in one line; `host/test_level_checks.py` has other sentences."""
    table = str(tmp_path / "table.npz")
    write_store(collect_texts([np.arange(5)], vocab_size=5), table)
    levels = [
        {"bigram": table, "num_tokens": 2},
        {"early_exit": 9, "num_tokens": 4},
        {"model": small_vocabulary.mid},
    ]
    config = {"method": "hsd", "num_speculative_tokens": 6, "levels": levels}
    given = ["--model", family.target, "--speculative-config", json.dumps(config)]
    given += ["--", "--skip-tokenizer-init", "--enable-lora", "--pipeline-parallel-size", "2"]
    assert cli.main(["doctor", *given]) == 2
    printed = capsys.readouterr().err.splitlines()
    lines = [line for line in printed if line.startswith("vllm-hsd doctor: ")]
    assert len(lines) == len(FAULTS), lines
    for words in FAULTS:
        assert len([line for line in lines if re.search(words, line)]) == 1, (words, lines)


def test_builds_that_do_not_import_are_one_problem_and_nothing_after_them_is_tried(
    tmp_path, monkeypatch
):
    names = "torchvision", "torchaudio", "torchcodec"
    for name in names:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('operator does not exist')")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    *_, problem, last = doctor.findings()
    assert problem.status == "problem" and f"pip uninstall -y {' '.join(names)}" in problem.text
    assert "mend that first" in last.text
