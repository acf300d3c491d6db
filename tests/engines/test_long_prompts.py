"""Prompts of several thousand tokens, windows, embeddings: greedy text equals no speculation."""

import pytest
import torch
from support.engines import alike, run_engine
from support.level_files import LevelFiles, cascade, write_level_files
from support.tiny_models import Family, build_family, with_sliding_window
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VOCABULARY, WINDOW = 64, 200
# Some repeat a phrase, for lookups; the last begins like the first.
PROMPTS = [
    *([(7 * i + j * j + j % 13) % 60 + 2 for j in range(n)] for i, n in enumerate((4100, 2047, 5))),
    [(j % 37) * (j % 37) % 60 + 2 for j in range(3000)],
]
PROMPTS.append([*PROMPTS[0][:2600], *PROMPTS[1][:700]])
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
JOBS = {
    "together": {"prompts": PROMPTS, "params": GREEDY},
    "prefix hits": {"prompts": PROMPTS, "params": {**GREEDY, "max_tokens": 32}},
    "one after the other": {
        "prompts": PROMPTS,
        "params": GREEDY,
        "arrive": [4 * i for i in range(len(PROMPTS))],
    },
    "up to max_model_len": {
        "prompts": [(PROMPTS[0] * 2)[: 4608 - n] for n in (1, 2, 9)],
        "params": GREEDY,
    },
    # vLLM refuses n > 1 at temperature 0.
    "several answers": {
        "prompts": PROMPTS,
        "params": {**GREEDY, "temperature": 1, "top_k": 1, "n": 3},
    },
    "prompt logprobs": {
        "prompts": PROMPTS,
        "params": [{**GREEDY, "prompt_logprobs": 2 * (i % 2), "logprobs": 2} for i in range(5)],
    },
    "priorities": {"prompts": PROMPTS * 3, "params": GREEDY, "priority": list(range(15, 0, -1))},
}
ENGINE = {
    "max_model_len": 4608,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "block_size": 32,
    "scheduling_policy": "priority",
}
CASCADES = {
    "models": lambda f, files: cascade({"model": f.small, "num_tokens": 3}, {"model": f.mid}),
    "model over a horizontal bigram": lambda f, files: cascade(
        {"bigram": files.store, "num_tokens": 2}, {"model": f.mid}, horizontal_tokens=2
    ),
    "exits": lambda f, files: cascade(
        {"exit_head": files.exit_head, "num_tokens": 3}, {"early_exit": 2}
    ),
    "n-grams": lambda f, files: cascade({"ngram": {"max": 3}, "num_tokens": 3}, {"model": f.mid}),
    "suffix": lambda f, files: cascade({"suffix": {"store": files.store, "shared_tokens": 2000}}),
    "eagle3": lambda f, files: cascade({"eagle3": files.eagle3}),
    "sources": lambda f, files: cascade(
        {"sources": [{"ngram": {"max": 3}}, {"eagle3": files.eagle3}], "num_tokens": 3},
        {"model": f.mid},
    ),
    "adaptive": lambda f, files: cascade(
        {"ngram": {"max": 3}, "num_tokens": 3},
        {"model": f.small, "num_tokens": 3},
        {"model": f.mid},
        adaptive=True,
    ),
    "model of a shorter context": lambda f, files: cascade(
        {"model": f.small, "num_tokens": 3, "max_model_len": 3010}, {"model": f.mid}
    ),
}


@pytest.fixture(scope="module")
def long_family(tmp_path_factory) -> Family:
    directory = tmp_path_factory.mktemp("long")
    return build_family(directory, VOCABULARY, peak=4.0, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def windowed(long_family, tmp_path_factory) -> Family:
    """The same family, each with a sliding window."""
    directory = tmp_path_factory.mktemp("windowed")
    models = [
        with_sliding_window(getattr(long_family, name), directory / name, WINDOW)
        for name in ("target", "mid", "small")
    ]
    return Family(*models, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def files(long_family, tmp_path_factory) -> LevelFiles:
    directory = tmp_path_factory.mktemp("files")
    return write_level_files(long_family.target, directory, VOCABULARY, trained=True)


@pytest.fixture(scope="module")
def plain(long_family):
    return run_engine({"model": long_family.target, **ENGINE}, JOBS)


def assert_equal(found: dict, wanted: dict) -> None:
    for job in wanted:
        for part in ("outputs", "prompt_logprobs"):
            assert alike(found[job][part], wanted[job][part], 1e-3), (job, part)


def drafted(results: dict, level: int) -> int:
    # vLLM's own speculator, which counts no levels, drafts with a head alone.
    counts = "spec_decode_num_draft_tokens"
    return sum(
        result["levels"][level]["drafted"] if result["levels"] else result["counters"][counts]
        for result in results.values()
    )


@pytest.mark.parametrize("name", CASCADES)
def test_long_prompts(long_family, files, plain, name):
    arguments = CASCADES[name](long_family, files)
    results = run_engine({"model": long_family.target, **ENGINE, **arguments}, JOBS)
    assert_equal(results, plain)
    levels = arguments["speculative_config"]["levels"]
    assert all(drafted(results, i) > 0 for i in range(len(levels)))


@pytest.mark.parametrize("place", ["both", "lowest", "top"])
def test_levels_with_a_sliding_window(long_family, windowed, plain, place):
    small = windowed.small if place != "top" else long_family.small
    mid = windowed.mid if place != "lowest" else long_family.mid
    arguments = cascade({"model": small, "num_tokens": 3}, {"model": mid})
    results = run_engine({"model": long_family.target, **ENGINE, **arguments}, JOBS)
    assert_equal(results, plain)
    assert all(drafted(results, i) > 0 for i in range(2))


@pytest.mark.parametrize("name", ["eagle3", "adaptive", "models", "n-grams", "sources"])
def test_prompts_of_embeddings(long_family, files, name):
    """Levels see token ids only, and embeddings have none: poor drafts, the same text."""
    weights = AutoModelForCausalLM.from_pretrained(long_family.target).model.embed_tokens.weight
    embedded = [{"prompt_embeds": weights[torch.tensor(p)].detach()} for p in PROMPTS[:3]]
    jobs = {
        "embedded": {"prompts": embedded, "params": GREEDY},
        "mixed": {"prompts": [PROMPTS[1], embedded[0], PROMPTS[3], embedded[2]], "params": GREEDY},
    }
    engine = {"model": long_family.target, **ENGINE, "enable_prompt_embeds": True}
    wanted = run_engine(engine, jobs)
    arguments = CASCADES[name](long_family, files)
    assert_equal(run_engine({**engine, **arguments}, jobs), wanted)
