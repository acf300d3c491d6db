"""Nothing is compiled once a server has started: vLLM's monitor hears of it."""

import pytest
from support import warm_ups
from support.cascades import cascade, head, stock
from support.engines import PROMPTS, ids, run_engine
from support.marks import slow

TOKENS = {"max_tokens": 24, "ignore_eos": True}
KINDS = {
    "greedy": [{"temperature": 0}] * 4,
    "seeds": [{"temperature": 0.8, "seed": i} for i in range(4)],
    "no seeds": [{"temperature": 0.8}] * 4,
    "temperature 1": [{"temperature": 1}] * 4,
    "top-p": [{"temperature": 1, "top_p": 0.9}] * 4,
    "top-p and top-k": [{"temperature": 0.7, "top_p": 0.8, "top_k": 20}] * 4,
    "min-p": [{"temperature": 0.7, "min_p": 0.1}] * 4,
    "mixed": [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1, "seed": 3},
        {"temperature": 1, "top_k": 9, "seed": 5},
    ],
}
# All at once, and one after another.
JOBS = {
    f"{name}, {how}": {
        "prompts": PROMPTS,
        "params": [{**TOKENS, **each} for each in kinds],
        "arrive": arrive,
    }
    for name, kinds in KINDS.items()
    for how, arrive in (("together", None), ("joining", [0, 2, 3, 9]))
}
# Of its draft models: a variant for each power of two of a prompt's length.
VLLMS = "_prepare_prefill_inputs_kernel"
ENGINE = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    # Not eager, which turns vLLM's warm-up off, but without torch.compile.
    "enforce_eager": False,
    "compilation_config": {"mode": 0},
    "jit_monitor_mode": "error",
}


def compiled(family, name: str, patch: str | None = None, work=warm_ups.run) -> dict[str, list]:
    """Job -> kernels that it compiled."""
    suffix, mid = {"suffix": {}}, {"model": family.mid}
    ngram, eagle3 = {"ngram": {"max": 3}}, {"eagle3": head(family)}
    config = {
        "suffix": cascade([{"suffix": {"min_acceptance": 0.01}}]),
        "two models": cascade([{"model": family.small, "num_tokens": 2}, mid]),
        "adaptive": {**cascade([{**suffix, "num_tokens": 2}, mid]), "adaptive": True},
        "head above a lookup": cascade([{"sources": [ngram, eagle3]}], 8) | {"adaptive": True},
        "head, model": cascade([{**eagle3, "num_tokens": 2}, mid]),
        "branches": cascade([{"sources": [ngram, suffix], "branches": 2}]),
        "stock drafter": stock("draft_model", **mid, num_speculative_tokens=3),
    }[name]
    engine = {**ENGINE, "speculative_config": config}
    found = run_engine({**engine, "model": family.target}, JOBS, patch=patch, work=work)
    assert all(len(text) == 24 for result in found.values() for text in ids(result))
    drafted = sum(r["counters"]["spec_decode_num_draft_tokens"] for r in found.values())
    assert drafted > 500
    return {
        job: made
        for job, result in found.items()
        if (made := [each for each in result["compiled"] if each[0] != VLLMS])
    }


@pytest.mark.parametrize(
    "name", ["branches", *slow("suffix", "two models", "head, model", "stock drafter")]
)
def test_requests_of_all_kinds_compile_nothing(family, name):
    assert compiled(family, name) == {}


@pytest.mark.parametrize("name", ["head above a lookup", *slow("adaptive")])
def test_levels_that_are_left_out_compile_nothing(family, name):
    assert compiled(family, name, work=warm_ups.run_adversary) == {}


def test_without_the_warm_up_they_do(family):
    assert len(compiled(family, "suffix", "support.warm_ups:without")["greedy, together"]) > 5


SHORT = {"short": {"prompts": PROMPTS, "params": {**TOKENS, "temperature": 0}}}


@pytest.fixture(scope="module")
def plain(family) -> list:
    return run_engine({"model": family.target}, SHORT)["short"]["outputs"]


def test_a_step_with_room_for_the_drafts_of_one_request_alone(family, plain):
    """Prompts of vLLM's warm-up are a token longer."""
    config = cascade([{"sources": [{"ngram": {"max": 3}}, {"suffix": {}}], "branches": 4}], 7)
    room = {"max_num_batched_tokens": 4 * 8, "max_model_len": 256, "block_size": 32}
    assert outputs(family, config, room) == plain


def test_texts_that_are_shorter_than_those_of_the_warm_up(family, plain):
    """Which would read and write past the rows of block tables."""
    room = {"max_model_len": 128, "max_num_batched_tokens": 128}
    assert outputs(family, cascade([{"model": family.mid}], 31), room) == plain


def outputs(family, config: dict, room: dict) -> list:
    engine = {**ENGINE, **room, "model": family.target, "speculative_config": config}
    del engine["jit_monitor_mode"]
    return run_engine(engine, SHORT)["short"]["outputs"]
