"""Stacks of every kind of level inside vLLM: laws, greedy equality, and that each key acts."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from runner_v1.test_law import CASES, ERROR, MAX_TOKENS, p_values, sampled
from support.engines import run_engine
from transformers import AutoModelForCausalLM

from vllm_hsd.cli.main import main
from vllm_hsd.core.bigram import count_bigrams, write_bigram
from vllm_hsd.core.exit_head import ExitHead, write_exit_head

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(8)]
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
COMPARED = ("temperature 0.7", "top_p", "greedy")
# Drafts shrink near the end of a request: long enough for the lowest of four levels to draft.
REQUESTED = 10

STACKS = {
    "ngram": lambda family, files: hsd(
        {"ngram": {"max": 3}, "num_tokens": 3},
        {"model": family.mid},
    ),
    "bigram": lambda family, files: hsd(
        {"bigram": files.bigram, "num_tokens": 2},
        {"model": family.small, "num_tokens": 3},
        {"model": family.mid},
    ),
    "early_exit": lambda family, files: hsd({"early_exit": 1}),
    "two early exits": lambda family, files: hsd(
        {"early_exit": 1, "num_tokens": 2},
        {"early_exit": 2},
    ),
    "exit_head": lambda family, files: hsd({"exit_head": files.exit_head}),
    "exit_head below an exit": lambda family, files: hsd(
        {"exit_head": files.exit_head, "num_tokens": 2, "stopping": "entropy"},
        {"early_exit": 2},
        horizontal_tokens=1,
    ),
    "exit_head above a model": lambda family, files: hsd(
        {"model": family.small, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 4},
        {"model": family.mid},
    ),
    "entropy windows": lambda family, files: hsd(
        {"bigram": files.bigram, "num_tokens": 3, "stopping": "entropy"},
        {"model": family.small, "num_tokens": 4, "stopping": "entropy"},
        {"model": family.mid, "stopping": "entropy"},
    ),
    "five models from ngram": lambda family, files: hsd(
        {"ngram": {"max": 3}, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 3, "stopping": "entropy"},
        {"model": family.small, "num_tokens": 4, "stopping": "entropy", "max_rounds": 2},
        {"model": family.mid, "stopping": "entropy"},
        num_speculative_tokens=7,
        horizontal_tokens=1,
    ),
    "five models from bigram": lambda family, files: hsd(
        {"bigram": files.bigram, "num_tokens": 2, "stopping": "entropy"},
        {"early_exit": 1, "num_tokens": 3, "stopping": "entropy"},
        {"model": family.small, "num_tokens": 4, "stopping": "entropy"},
        {"model": family.mid, "stopping": "entropy"},
        num_speculative_tokens=7,
        horizontal_tokens=2,
    ),
}


@dataclass(frozen=True)
class Files:
    """What levels read: a bigram table, and a head on the target's first layer."""

    bigram: str
    exit_head: str


@pytest.fixture(scope="module")
def files(small_vocabulary, tmp_path_factory) -> Files:
    """A table counted on random text; the target's own head with noise on every weight."""
    directory = tmp_path_factory.mktemp("files")
    found = Files(str(directory / "table.npz"), str(directory / "layer-1"))
    text = np.random.default_rng(0).integers(0, 5, 500)
    write_bigram(count_bigrams([text], vocab_size=5), found.bigram)
    own = head_of(small_vocabulary.target, layer=1)
    noise = torch.randn(own.weight.shape, generator=torch.Generator().manual_seed(0))
    write_exit_head(
        replace(own, weight=own.weight + 0.3 * own.weight.std() * noise), directory / "layer-1"
    )
    return found


def head_of(model: str, layer: int) -> ExitHead:
    """The target's own norm and head, to be put behind an earlier layer or the last."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    norm = loaded.model.norm
    return ExitHead(layer, norm.weight.data, loaded.lm_head.weight.data, norm.variance_epsilon)


def hsd(*levels: dict, **keys) -> dict:
    cascade = {"method": "hsd", "num_speculative_tokens": 5, "levels": list(levels), **keys}
    return {"speculative_config": cascade}


@pytest.mark.parametrize(
    "count", [600, pytest.param(20000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
@pytest.mark.parametrize("stack", STACKS)
def test_joint_law(small_vocabulary, files, stack, count):
    engine = {"model": small_vocabulary.target, **STACKS[stack](small_vocabulary, files)}
    longer = {
        name: (prompt, {**params, "max_tokens": REQUESTED})
        for name, (prompt, params) in CASES.items()
        if name in COMPARED
    }
    outputs, result = sampled(engine, count, longer)
    assert all(level["drafted"] > 0 for level in result["levels"])
    first = {name: [ids[:MAX_TOKENS] for ids in outputs[name]] for name in outputs}
    found = p_values(small_vocabulary.target, first)
    assert min(found.values()) > ERROR, found


@pytest.fixture(scope="module")
def plain(small_vocabulary):
    engine = {"model": small_vocabulary.target}
    job = {"prompts": PROMPTS, "params": GREEDY}
    return run_engine(engine, {"greedy": job})["greedy"]["outputs"]


@pytest.mark.parametrize("stack", STACKS)
def test_greedy_equals_no_speculation(small_vocabulary, files, plain, stack):
    engine = {"model": small_vocabulary.target, **STACKS[stack](small_vocabulary, files)}
    result = run_engine(engine, {"greedy": {"prompts": PROMPTS, "params": GREEDY}})
    assert result["greedy"]["outputs"] == plain


def rates(engine: dict) -> list[float]:
    """Accepted share of what each level drafted, at temperature 1."""
    job = {"prompts": PROMPTS, "params": {**GREEDY, "temperature": 1, "seed": 1}}
    levels = run_engine(engine, {"job": job})["job"]["levels"]
    return [level["accepted"] / level["drafted"] for level in levels]


def test_an_exit_behind_every_layer_accepts_everything(small_vocabulary):
    engine = {"model": small_vocabulary.target}
    assert rates({**engine, **hsd({"early_exit": 2})}) == [1.0]


def test_the_targets_own_head_behind_every_layer_accepts_everything(small_vocabulary, tmp_path):
    write_exit_head(head_of(small_vocabulary.target, layer=2), tmp_path)
    engine = {"model": small_vocabulary.target}
    assert rates({**engine, **hsd({"exit_head": str(tmp_path)})}) == [1.0]


def test_what_the_commands_write_is_served(text_family, tmp_path):
    """A trained head accepts more than the plain exit that its training started from."""
    text = np.random.default_rng(0).integers(32, 127, 6000, dtype=np.uint8).tobytes().decode()
    corpus, table = str(tmp_path / "text"), str(tmp_path / "table")
    (tmp_path / "text").write_text(text)
    assert main(["build", "bigram", "--target", text_family.target, corpus, "-o", table]) == 0
    arguments = ["--target", text_family.target, "--layers", "1", "--steps", "40"]
    assert main(["build", "exit-heads", *arguments, "-o", str(tmp_path), corpus]) == 0
    engine = {"model": text_family.target}
    lowest, head = {"bigram": table, "num_tokens": 2}, {"exit_head": str(tmp_path / "layer-1")}
    (plain,) = rates({**engine, **hsd({"early_exit": 1})})
    bigram, trained = rates({**engine, **hsd(lowest, head)})
    assert trained > plain + 0.02 and bigram > 0


def test_windows_and_temperatures_act(small_vocabulary):
    """An entropy window wastes fewer tokens than a fixed one; a wrong temperature wastes more."""
    engine, drafter = {"model": small_vocabulary.target}, {"model": small_vocabulary.small}
    fixed = rates({**engine, **hsd(drafter)})[0]
    assert rates({**engine, **hsd({**drafter, "stopping": "entropy"})})[0] > fixed
    assert rates({**engine, **hsd({**drafter, "temperature_scale": 3.0})})[0] < fixed
