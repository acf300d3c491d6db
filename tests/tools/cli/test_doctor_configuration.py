"""`vllm-hsd doctor` on the user's own models: one run names everything that would not work."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from support.cascades import head
from support.damage import change_config, damaged_copy

from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.tools.cli import doctor
from vllm_hsd.tools.cli import main as cli


def check_faults(capsys, target: str, config: dict, said: list[str], *arguments: str) -> None:
    """Each in one line; `host/test_level_checks.py` has other sentences."""
    given = ["--model", target, "--speculative-config", json.dumps(config)]
    assert cli.main(["doctor", *given, "--", "--skip-tokenizer-init", *arguments]) == 2
    printed = capsys.readouterr().err.splitlines()
    lines = [line for line in printed if line.startswith("vllm-hsd doctor: ")]
    assert len(lines) == len(said), lines
    for words in said:
        assert len([line for line in lines if re.search(words, line)]) == 1, (words, lines)


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt": 3}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "hsd", "num_speculative_tokens": 4, "levels": []}, "levels"),
        ({**NGRAM, "rejection_sample_method": "hierarchical"}, "vLLM refuses prompt"),
        (NGRAM, "vLLM refuses prompt"),
        ({"method": "draft_model", "model": "/no/where"}, "/no/where"),
    ],
)
def test_a_configuration_is_refused_in_one_sentence(family, config, words, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_bfloat16_status", lambda: 0)
    check_faults(capsys, family.target, config, [words])


def test_a_model_that_is_not_here_and_no_network(capsys, monkeypatch):
    """vLLM looks for its files before the configuration is made."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    check_faults(capsys, "some/model", NGRAM, ["vLLM refuses .* cached snapshot"])


def test_arguments_of_a_server_are_refused_in_one_sentence(family, capsys):
    refused = "vLLM's engine refuses the arguments: unrecognized arguments: --port 8000"
    check_faults(capsys, family.target, NGRAM, [refused], "--port", "8000")


def cascade(*levels: dict) -> dict:
    return {"method": "hsd", "num_speculative_tokens": 6, "levels": levels}


def test_every_fault_is_named_once(family, small_vocabulary, tmp_path, capsys):
    table = str(tmp_path / "table.npz")
    write_store(collect_texts([np.arange(5)], vocab_size=5), table)
    config = cascade(
        {"bigram": table, "num_tokens": 2},
        {"early_exit": 9, "num_tokens": 4},
        {"model": small_vocabulary.mid},
    )
    said = [
        "set pipeline_parallel_size to 1",
        r"bigram.* built for 5 tokens and the target has 64",
        r"levels\[1\].early_exit is 9, but the target has 2 layers",
        r"levels\[1\].early_exit .* LoRA adapters: remove the level or enable_lora\.",
        r"levels\[2\].model .* vocabulary of 5 tokens",
    ]
    arguments = "--enable-lora", "--pipeline-parallel-size", "2"
    check_faults(capsys, family.target, config, said, *arguments)


def test_branches_that_workers_would_refuse_are_named(family, capsys):
    config = cascade({"sources": [{"ngram": {"max": 3}}, {"suffix": {}}], "branches": 4})
    said = ["max_num_seqs=2 in all", "make 28 tokens of a request, above max_num_batched_tokens=6"]
    arguments = "--max-num-seqs", "2", "--max-num-batched-tokens", "6"
    check_faults(capsys, family.target, config, said, *arguments)


# vLLM looks at another architecture in a process of its own: ten seconds of CPU.
@pytest.mark.slow
def test_a_target_that_gives_no_states_is_named(family, tmp_path, capsys):
    change = change_config(model_type="gemma", architectures=["GemmaForCausalLM"])
    gemma = damaged_copy(family.target, tmp_path / "gemma", change)
    sources = [{"ngram": {"max": 3}}, {"eagle3": head(family)}]
    said = [
        r"levels\[0\].sources\[1\].eagle3 reads hidden states that GemmaForCausalLM does not give",
        r"levels\[1\].early_exit works with the targets",
    ]
    config = cascade({"sources": sources, "num_tokens": 3}, {"early_exit": 1})
    check_faults(capsys, gemma, config, said)


def test_an_mtp_level_needs_no_states_that_heads_read():
    engine = SimpleNamespace(speculative_config=cascade({"mtp": {}}))
    assert doctor._head_mistakes(engine) == []


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
