"""`vllm-hsd doctor` on the user's own models: one run names everything that would not work."""

import json
import re
import shutil
import sys
from collections.abc import Callable

import numpy as np
import pytest
from support.damage import change_config, damaged_copy
from support.eagle3_head import write_eagle3_head

from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.tools.cli import doctor
from vllm_hsd.tools.cli import main as cli


@pytest.fixture(scope="module")
def models(family, small_vocabulary, tmp_path_factory) -> dict[str, str]:
    """Paths of targets of several architectures, without weights, and of what levels read."""
    directory = tmp_path_factory.mktemp("doctor")

    def with_config(name: str, source: str = family.target, **changes) -> str:
        return damaged_copy(source, directory / name, change_config(**changes))

    (directory / "eagle3").mkdir()
    table = str(directory / "table.npz")
    write_store(collect_texts([np.arange(5)], vocab_size=5), table)
    experts = {"model_type": "mixtral", "num_local_experts": 4}
    gemma = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}
    mamba = {"model_type": "mamba", "architectures": ["MambaForCausalLM"]}
    renamed = shutil.copytree(small_vocabulary.mid, directory / "other")
    return {
        "llama": family.target,
        "drafter": family.mid,
        "experts": with_config("experts", **experts, architectures=["MixtralForCausalLM"]),
        "gemma": with_config("gemma", **gemma),
        "recurrent": with_config("recurrent", **mamba),
        "of five tokens": str(renamed),
        "eagle3": write_eagle3_head(family.target, directory / "eagle3"),
        "bigram": table,
    }


# name -> (target, levels, arguments of vLLM, what is said, each in one line)
CASES: dict[str, tuple[str, Callable[[dict], list[dict]], str, list[str]]] = {
    "vocabularies, layers, adapters, pipelines": (
        "llama",
        lambda m: [
            {"bigram": m["bigram"], "num_tokens": 2},
            {"early_exit": 9, "num_tokens": 4},
            {"model": m["of five tokens"]},
        ],
        "--enable-lora --pipeline-parallel-size 2",
        [
            "set pipeline_parallel_size to 1",
            r"bigram.* built for 5 tokens and the target has 64",
            r"levels\[1\].early_exit is 9, but the target has 2 layers",
            r"levels\[1\].early_exit .* LoRA adapters: remove the level or enable_lora\.",
            r"levels\[2\].model .* vocabulary of 5 tokens",
        ],
    ),
    "states that a target does not give, exits that it has not": (
        "gemma",
        lambda m: [
            {"sources": [{"ngram": {"max": 3}}, {"eagle3": m["eagle3"]}], "num_tokens": 3},
            {"early_exit": 1},
        ],
        "",
        [
            r"levels\[0\].eagle3 reads hidden states that GemmaForCausalLM does not give",
            r"levels\[1\].early_exit works with the targets",
        ],
    ),
    "experts, a drafter with recurrent state, its own tensor parallelism": (
        "experts",
        lambda m: [
            {"model": m["recurrent"], "num_tokens": 2},
            {"model": m["drafter"], "draft_tensor_parallel_size": 2},
        ],
        "--data-parallel-size 2",
        [
            "set data_parallel_size to 1",
            r"levels\[0\].model .* recurrent state",
            r"levels\[1\].draft_tensor_parallel_size is 2 .* must be equal",
        ],
    ),
}


# vLLM looks at each other architecture in a process of its own: ten seconds of CPU.
@pytest.mark.parametrize(
    "name", [next(iter(CASES)), *(pytest.param(n, marks=pytest.mark.slow) for n in [*CASES][1:])]
)
def test_every_fault_is_named_once(models, name, capsys):
    target, levels, arguments, expected = CASES[name]
    config = {"method": "hsd", "num_speculative_tokens": 6, "levels": levels(models)}
    given = ["--model", models[target], "--speculative-config", json.dumps(config)]
    status = cli.main(["doctor", *given, "--", "--skip-tokenizer-init", *arguments.split()])
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if line.startswith("vllm-hsd doctor: ")]
    assert status == 2 and len(lines) == len(expected), lines
    for words in expected:
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
