"""Cascades of every kind of level: sampled distribution and greedy equality."""

import pytest
from support.engines import run_engine
from support.level_files import LevelFiles, cascade, write_level_files
from support.marks import slow
from support.sampling_cases import CASES, SIGNIFICANCE, p_values, sampling_job

PROMPTS = [[(3 * i + j * j) % 5 for j in range(4 + 6 * i)] for i in range(8)]
GREEDY = {"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": 40, "ignore_eos": True}}
COMPARED = {name: CASES[name] for name in ("temperature 0.7", "top_p")}
# Drafts shrink near the end of a request: long enough for the lowest of four levels to draft.
MAX_TOKENS = 10

CASCADES = {
    "ngram": lambda family, files: cascade(
        {"ngram": {"max": 3}, "num_tokens": 3},
        {"model": family.mid},
    ),
    "bigram": lambda family, files: cascade(
        {"bigram": files.store, "num_tokens": 2},
        {"model": family.small, "num_tokens": 3},
        {"model": family.mid},
    ),
    "interleaved": lambda family, files: cascade(
        {"model": family.small, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 4, "verifier": "none"},
        {"model": family.mid, "verifier": "none"},
        num_speculative_tokens=7,
    ),
    "eagle3": lambda family, files: cascade({"eagle3": files.eagle3}),
    "eagle3 below a model": lambda family, files: cascade(
        {"eagle3": files.eagle3, "num_tokens": 2, "stopping": "entropy"},
        {"model": family.mid},
        horizontal_tokens=1,
    ),
    "early_exit": lambda family, files: cascade({"early_exit": 1}),
    "two early exits": lambda family, files: cascade(
        {"early_exit": 1, "num_tokens": 2},
        {"early_exit": 2},
    ),
    "exit_head": lambda family, files: cascade({"exit_head": files.exit_head}),
    "exit_head below an exit": lambda family, files: cascade(
        {"exit_head": files.exit_head, "num_tokens": 2, "stopping": "entropy"},
        {"early_exit": 2},
        horizontal_tokens=1,
    ),
    "exit_head above a model": lambda family, files: cascade(
        {"model": family.small, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 4},
        {"model": family.mid},
    ),
    "entropy-based stopping": lambda family, files: cascade(
        {"ngram_model": files.store, "order": 1, "num_tokens": 3, "stopping": "entropy"},
        {"model": family.small, "num_tokens": 4, "stopping": "entropy"},
        {"model": family.mid, "stopping": "entropy"},
    ),
    "suffix": lambda family, files: cascade({"suffix": {"store": files.store}}),
    "ngram_model": lambda family, files: cascade({"ngram_model": files.store}),
    "ngram_model among sources": lambda family, files: cascade(
        {"sources": [{"ngram": {"max": 3}}, {"ngram_model": files.store}], "num_tokens": 3},
        {"model": family.mid},
    ),
    "several sources": lambda family, files: cascade(
        {
            "sources": [
                {"ngram": {"max": 3}},
                {"suffix": {"store": files.store, "shared_tokens": 500}},
                {"model": family.small},
            ],
            "num_tokens": 3,
        },
        {"model": family.mid},
    ),
    "five models from ngram": lambda family, files: cascade(
        {"ngram": {"max": 3}, "num_tokens": 2},
        {"exit_head": files.exit_head, "num_tokens": 3, "stopping": "entropy"},
        {"model": family.small, "num_tokens": 4, "stopping": "entropy", "max_rounds": 2},
        {"model": family.mid, "stopping": "entropy"},
        num_speculative_tokens=7,
        horizontal_tokens=1,
    ),
    "five models from pairs": lambda family, files: cascade(
        {"ngram_model": files.store, "order": 1, "num_tokens": 2, "stopping": "entropy"},
        {"early_exit": 1, "num_tokens": 3, "stopping": "entropy"},
        {"model": family.small, "num_tokens": 4, "stopping": "entropy"},
        {"model": family.mid, "stopping": "entropy"},
        num_speculative_tokens=7,
        horizontal_tokens=2,
    ),
}
# Their levels are also in the others.
SLOW = (
    "two early exits",
    "exit_head below an exit",
    "exit_head above a model",
    "five models from pairs",
)


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
