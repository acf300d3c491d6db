"""A KV connector carries the levels' caches from engine to engine, with the target's.

On vLLM's `ExampleConnector`: the only one in 0.32 that needs neither a GPU nor a service.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cascades import head
from support.engines import configuration_errors, run_engine

BLOCK_SIZE = 32
PROMPTS = [[(7 * i + 3 * j + j * j) % 60 + 2 for j in range(40 + 17 * i)] for i in range(6)]
# Whole blocks before a prompt's last token.
STORED = sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS)
JOB = {"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": 40, "ignore_eos": True}}


def engine(family, store: Path | None, levels: list[dict], **keys) -> dict:
    """Arguments of an engine whose connector has `store`, if any."""
    found = {"model": family.target, "block_size": BLOCK_SIZE}
    if levels:
        cascade = {"method": "hsd", "num_speculative_tokens": 5, "levels": levels, **keys}
        found["speculative_config"] = cascade
    if store is not None:
        found["kv_transfer_config"] = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        }
    return found


def run(*args, **keys) -> dict:
    """Result of the prompts in an `engine` of their own."""
    return run_engine(engine(*args, **keys), {"job": JOB})["job"]


@pytest.fixture(scope="module")
def plain(family) -> list:
    return run(family, None, [])["outputs"]


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_gpus")
def test_levels_lose_nothing_and_a_damaged_cache_no_text(family, plain, tmp_path):
    """Drafters equal to the target, so that every entry that is not the right one costs tokens.

    By fixed schedules: on a CPU levels read what comes from elsewhere anew. With other numbers in
    the levels' files the third engine, a negative control, accepts less.
    """
    levels = [{"model": family.target, "num_tokens": 3}, {"model": family.target}]
    found = [run(family, tmp_path, levels) for _ in range(2)]
    damaged = sorted(tmp_path.glob("*/hsd_level*.safetensors"))
    assert len(damaged) == len(PROMPTS) * 2 * 2  # two levels of two layers
    for path in damaged:
        kept = load_file(path)
        save_file({name: torch.randn_like(value) for name, value in kept.items()}, path)
    found.append(run(family, tmp_path, levels))
    loaded = [result["counters"]["external_prefix_cache_hits"] for result in found]
    assert loaded == [0, STORED, STORED]
    assert all(result["outputs"] == plain for result in found)
    for result in found[:2]:
        low, top = result["levels"]
        assert low["accepted"] == low["drafted"] > 0
        # Each text that has ended leaves its last draft.
        assert top["accepted"] == top["drafted"] - 5 * len(PROMPTS) > 0
    top = found[2]["levels"][-1]
    assert top["accepted"] < 0.8 * top["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("lowest", ["a model", "an early exit", "a head"])
def test_text_is_that_of_no_speculation(family, plain, tmp_path, lowest):
    """Of a head too, from whose prefix the target's states are in the other engine."""
    level, mid = {"num_tokens": 2}, {"model": family.mid}
    levels, keys = {
        "a model": ([{**level, "model": family.small}, mid], {"horizontal_tokens": 2}),
        "an early exit": ([{**level, "early_exit": 1}, mid], {"horizontal_tokens": 2}),
        "a head": ([{"eagle3": head(family)}], {}),
    }[lowest]
    found = [run(family, tmp_path, levels, **keys) for _ in range(2)]
    assert all(result["outputs"] == plain for result in found)
    assert all(result["counters"]["spec_decode_num_draft_tokens"] > 0 for result in found)
    if keys:
        assert found[1]["counters"]["external_prefix_cache_hits"] == STORED
        accepted = [[level["accepted"] for level in result["levels"]] for result in found]
        assert accepted[0] == accepted[1] and min(accepted[0]) > 0


def test_levels_that_fill_their_caches_late_are_refused(family, tmp_path):
    ngram, small = {"ngram": {"max": 3}}, {"model": family.small}
    sources = [{"sources": [ngram, small], "num_tokens": 2}, {"model": family.mid}]
    engines = [
        engine(family, tmp_path, [small | {"num_tokens": 2}, {"model": family.mid}], adaptive=True),
        engine(family, tmp_path, sources),
        engine(family, None, sources) | {"kv_offloading_size": 1},
        engine(family, tmp_path, [{"sources": [ngram, ngram], "branches": 2}]),
        engine(family, None, sources, adaptive=True),
        engine(family, tmp_path, [{"sources": [ngram, ngram]}]),
        engine(family, tmp_path, [ngram], adaptive=True),
    ]
    late = "fills the cache of a model no sooner than the model drafts, too late for a KV connector"
    key = "levels[0].sources"
    assert configuration_errors(engines) == [
        f"UserError: adaptive {late}: remove adaptive or kv_transfer_config.",
        f"UserError: {key} {late}: remove {key} or kv_transfer_config.",
        f"UserError: {key} {late}: remove {key} or kv_offloading_size.",
        "UserError: levels[0].branches are computed in blocks that a KV connector would take: "
        "remove branches or kv_transfer_config.",
        *[None] * 3,
    ]
