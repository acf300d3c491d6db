"""Targets of the architectures that people serve, with model levels and early exits."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from support.architectures import ARCHITECTURES, COMMON, write_models
from support.engines import ids, in_process, run_engine, started
from support.level_files import cascade, target_head
from support.marks import slow_but

import vllm_hsd
from vllm_hsd.cascade.exit_head import EXIT_ARCHITECTURES, write_exit_head
from vllm_hsd.tools.audit import sampled
from vllm_hsd.tools.audit.sampled import Setting
from vllm_hsd.tools.exit_head_training import plain_exit_head

# Longer than the sliding windows.
PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(4 + 9 * i)] for i in range(4)]
PARAMS = [{"temperature": t, "max_tokens": 30, "ignore_eos": True} for t in (0, 0, 0, 1)]
GREEDY = {"text": {"prompts": PROMPTS[:3], "params": PARAMS[:3]}}
JOBS = {"text": {"prompts": PROMPTS, "params": PARAMS}}
FAST = "Gemma2"

pytestmark = pytest.mark.timeout(600)


def architecture(name: str) -> str:
    return name.removesuffix("Text") + "ForCausalLM"


def greedy(result: dict) -> list[list[int]]:
    return ids(result["text"])[:3]


@pytest.fixture(scope="module", params=slow_but([(FAST,)], [(name,) for name in ARCHITECTURES]))
def models(request, tmp_path_factory):
    target, drafter = write_models(request.param, tmp_path_factory.mktemp(request.param))
    return request.param, target, drafter, greedy(run_engine({"model": target}, JOBS))


@pytest.mark.parametrize("kind", ["early_exit", "exit_head"])
def test_an_exit_after_all_layers_is_the_target(models, tmp_path, kind):
    """With scaling, norm and soft caps; a head is the target's own, and has the same argmax."""
    name, target, _, plain = models
    if architecture(name) not in EXIT_ARCHITECTURES:
        pytest.skip(f"{name} has no exits")
    depth = COMMON["num_hidden_layers"]
    level, jobs = {"early_exit": depth}, JOBS
    if kind == "exit_head":
        write_exit_head(target_head(target, depth), tmp_path)
        level, jobs = {"exit_head": str(tmp_path)}, GREEDY
    result = run_engine({"model": target, **cascade(level)}, jobs)
    assert greedy(result) == plain
    (level,) = result["text"]["levels"]
    assert level["accepted"] == level["drafted"] > 0


def test_a_head_on_the_embedding_is_a_target_whose_layers_add_nothing(models, tmp_path):
    name, target, *_ = models
    if architecture(name) not in EXIT_ARCHITECTURES:
        pytest.skip(f"{name} has no exits")
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search("o_proj|down_proj|w2", name):
                weight.zero_()
    model.save_pretrained(tmp_path / "idle")
    write_exit_head(plain_exit_head(model, 0), tmp_path / "head")
    config = cascade({"exit_head": str(tmp_path / "head")})
    result = run_engine({"model": str(tmp_path / "idle"), **config}, GREEDY)
    (level,) = result["text"]["levels"]
    assert level["accepted"] == level["drafted"] > 0


def test_cascade_text_is_that_of_no_speculation(models):
    name, target, drafter, plain = models
    levels = [{"model": drafter}]
    if architecture(name) in EXIT_ARCHITECTURES:
        levels = [{"early_exit": 1, "num_tokens": 2}, *levels]
    result = run_engine({"model": target, **cascade(*levels)}, JOBS)
    assert greedy(result) == plain
    assert all(level["drafted"] > 0 for level in result["text"]["levels"])
    first, last = result["text"]["levels"][0], result["text"]["levels"][-1]
    assert last["accepted"] > 0
    # One layer is not the whole target.
    assert len(levels) == 1 or first["accepted"] < first["drafted"]


@pytest.mark.slow
def test_sampled_text_follows_the_target(models):
    """Randomized quantiles under the engine without speculation; finds a deviation of 8 %."""
    name, target, drafter, _ = models
    levels = [{"model": drafter}]
    if architecture(name) in EXIT_ARCHITECTURES:
        levels = [{"early_exit": 2, "num_tokens": 3}, *levels]
    settings = [Setting(1.0), Setting(0.7, {"top_p": 0.9})]
    with started({"model": target, **cascade(*levels)}) as engine:
        plan = sampled.planned(PROMPTS, settings, 2048, 64)
        texts = sampled.generate(engine, plan, 32, print)
    with started({"model": target}) as engine:
        ranges = sampled.scored(engine, texts, 32, print)
    assert texts.accepted > 0
    assert not sampled.failures(sampled.checks(texts, ranges, "float32", 0))


def targets_of_heads(names: list[str]) -> dict[str, bool]:
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.models
    return {name: supports_eagle3(known[name].load_model_cls()) for name in names}


@pytest.mark.slow
def test_the_documented_targets_give_states_to_eagle3_heads():
    found = in_process(targets_of_heads, {"names": [architecture(n) for n in ARCHITECTURES]})
    rows = re.findall(r"^\| `(\w+)` \| yes \| \w+ \| (yes|no)", table(), re.MULTILINE)
    assert dict(rows) == {name: "yes" if gives else "no" for name, gives in found.items()}


def table() -> str:
    return (Path(vllm_hsd.__file__).parents[1] / "docs" / "models.md").read_text()


def test_every_architecture_with_exits_is_tested_and_documented():
    assert {architecture(name) for name in ARCHITECTURES} >= set(EXIT_ARCHITECTURES)
    for name in EXIT_ARCHITECTURES:
        assert hasattr(transformers, name)
    rows = dict(re.findall(r"^\| `(\w+)` \| yes \| (yes|no)", table(), re.MULTILINE))
    assert rows == {
        architecture(name): "yes" if architecture(name) in EXIT_ARCHITECTURES else "no"
        for name in ARCHITECTURES
    }
