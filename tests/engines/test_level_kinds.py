"""Cascades of every kind of level: sampled distribution and greedy equality."""

import pytest
from support.engines import run_engine
from support.level_files import LevelFiles, cascade, every_kind, write_level_files
from support.marks import slow
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(8)]
GREEDY = {"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": 40, "ignore_eos": True}}
COMPARED = {name: CASES[name] for name in ("temperature 0.7", "top_p")}
# Drafts shrink near the end of a request: long enough for the lowest of four levels to draft.
MAX_TOKENS = 10

LOOKUP, ENDS = {"ngram": {"max": 3}}, {"stopping": "entropy"}
CASCADES = {
    "ngram": lambda f, files: cascade({**LOOKUP, "num_tokens": 3}, {"model": f.mid}),
    "bigram": lambda f, files: cascade(
        {"bigram": files.store, "num_tokens": 2},
        {"model": f.small, "num_tokens": 3},
        {"model": f.mid},
    ),
    "interleaved": lambda f, files: cascade(
        {"model": f.small, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 4, "verifier": "none"},
        {"model": f.mid, "verifier": "none"},
        num_speculative_tokens=7,
    ),
    "eagle3": lambda f, files: cascade({"eagle3": files.eagle3}),
    "eagle3 below a model": lambda f, files: cascade(
        {"eagle3": files.eagle3, "num_tokens": 2, **ENDS}, {"model": f.mid}, horizontal_tokens=1
    ),
    "early_exit": lambda f, files: cascade({"early_exit": 1}),
    "two early exits": lambda f, files: cascade(
        {"early_exit": 1, "num_tokens": 2}, {"early_exit": 2}
    ),
    "exit_head": lambda f, files: cascade({"exit_head": files.exit_head}),
    "exit_head below an exit": lambda f, files: cascade(
        {"exit_head": files.exit_head, "num_tokens": 2, **ENDS},
        {"early_exit": 2},
        horizontal_tokens=1,
    ),
    "exit_head above a model": lambda f, files: cascade(
        {"model": f.small, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 4},
        {"model": f.mid},
    ),
    "entropy-based stopping": lambda f, files: cascade(
        {"bigram_model": files.store, "num_tokens": 3, **ENDS},
        {"model": f.small, "num_tokens": 4, **ENDS},
        {"model": f.mid, **ENDS},
    ),
    "suffix": lambda f, files: cascade({"suffix": {"store": files.store}}),
    "bigram_model": lambda f, files: cascade({"bigram_model": files.store}),
    "bigram_model among sources": lambda f, files: cascade(
        {"sources": [LOOKUP, {"bigram_model": files.store}], "num_tokens": 3}, {"model": f.mid}
    ),
    "several sources": lambda f, files: cascade(
        {"sources": [LOOKUP, every_kind(f, files)["suffix"], {"model": f.small}], "num_tokens": 3},
        {"model": f.mid},
    ),
    "five models from ngram": lambda f, files: cascade(
        {**LOOKUP, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 3, **ENDS},
        {"model": f.small, "num_tokens": 4, **ENDS, "max_rounds": 2},
        {"model": f.mid, **ENDS},
        num_speculative_tokens=7,
        horizontal_tokens=1,
    ),
    "five models from pairs": lambda f, files: cascade(
        {"bigram_model": files.store, "num_tokens": 2, **ENDS},
        {"early_exit": 1, "num_tokens": 3, **ENDS},
        {"model": f.small, "num_tokens": 4, **ENDS},
        {"model": f.mid, **ENDS},
        num_speculative_tokens=7,
        horizontal_tokens=2,
    ),
}
# Their levels are also in the others.
SLOW = ("two early exits", "exit_head below an exit", "exit_head above a model")
SLOW += ("five models from pairs",)


@pytest.fixture(scope="module")
def files(small_vocabulary, tmp_path_factory) -> LevelFiles:
    directory = tmp_path_factory.mktemp("files")
    return write_level_files(small_vocabulary.target, directory, trained=True)


FAST = [name for name in CASCADES if name not in SLOW]


@pytest.fixture(scope="module", params=[*FAST, *slow(*SLOW)])
def engine(request, small_vocabulary, files) -> dict:
    return {"model": small_vocabulary.target, **CASCADES[request.param](small_vocabulary, files)}


@pytest.fixture(scope="module")
def results(engine) -> dict:
    return run_engine(
        engine, {"sampled": sampling_job(COMPARED, 250, MAX_TOKENS), "greedy": GREEDY}
    )


@pytest.fixture(scope="module")
def plain(small_vocabulary) -> list:
    return run_engine({"model": small_vocabulary.target}, {"greedy": GREEDY})["greedy"]["outputs"]


def check_samples(small_vocabulary, result: dict) -> None:
    assert result["counters"]["spec_decode_num_draft_tokens"] > 0
    # A head alone is vLLM's own drafter, which has no levels.
    *below, _ = result["levels"] or [None]
    # Tokens that are passed on unverified count as those of the level whose draft is verified.
    assert all(level["drafted"] > 0 or level["forwards"] > 0 for level in below)
    found = p_values(small_vocabulary.target, COMPARED, result)
    assert min(found.values()) > SIGNIFICANCE, found


def test_samples_follow_the_target(small_vocabulary, results):
    check_samples(small_vocabulary, results["sampled"])


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_20000_samples_follow_the_target(small_vocabulary, engine):
    job = sampling_job(COMPARED, 20000, MAX_TOKENS)
    check_samples(small_vocabulary, run_engine(engine, {"sampled": job})["sampled"])


def test_greedy_equals_no_speculation(results, plain):
    assert results["greedy"]["outputs"] == plain
