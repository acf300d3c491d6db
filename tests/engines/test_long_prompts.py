"""Prompts of several thousand tokens: greedy text equals no speculation."""

import pytest
from engines.test_level_kinds import EXIT_HEAD, HEAD, LOOKUP, MID, SECOND, SMALL, THREE, TWO
from support.engines import differing, run_engine
from support.level_files import LevelFiles, cascade, filled, write_level_files

from vllm_hsd.tools.audit.tiny_models import Family, build_family

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VOCABULARY = 64
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
    "one after the other": {"prompts": PROMPTS, "params": GREEDY, "arrive": [0, 4, 8, 12, 16]},
    "up to max_model_len": {
        "prompts": [(PROMPTS[0] * 2)[: 4608 - n] for n in (1, 2, 9)],
        "params": GREEDY,
    },
}
ENGINE = {"max_model_len": 4608, "max_num_batched_tokens": 512, "max_num_seqs": 8, "block_size": 32}
# (levels, other keys), as of test_level_kinds.py.
CASCADES: dict[str, tuple[list[dict], dict]] = {
    "models": ([SMALL | THREE, MID], {}),
    "model over a horizontal bigram": ([{"bigram": "store"} | TWO, MID], {"horizontal_tokens": 2}),
    "exits": ([EXIT_HEAD | THREE, SECOND], {}),
    "n-grams": ([LOOKUP | THREE, MID], {}),
    "suffix": ([{"suffix": {"store": "store", "shared_tokens": 2000}}], {}),
    "eagle3": ([HEAD], {}),
    "sources": ([{"sources": [LOOKUP, HEAD]} | THREE, MID], {}),
    "adaptive": ([LOOKUP | THREE, SMALL | THREE, MID], {"adaptive": True}),
    "model of a shorter context": ([SMALL | THREE | {"max_model_len": 3010}, MID], {}),
}


@pytest.fixture(scope="module")
def long_family(tmp_path_factory) -> Family:
    directory = tmp_path_factory.mktemp("long")
    return build_family(directory, VOCABULARY, peak=4.0, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def files(long_family, tmp_path_factory) -> LevelFiles:
    directory = tmp_path_factory.mktemp("files")
    return write_level_files(long_family.target, directory, VOCABULARY, trained=True)


@pytest.fixture(scope="module")
def plain(long_family):
    return run_engine({"model": long_family.target, **ENGINE}, JOBS)


@pytest.mark.parametrize("name", CASCADES)
def test_texts_are_those_of_no_speculation(long_family, files, plain, name):
    levels, keys = CASCADES[name]
    drafters = cascade(*filled(levels, {**vars(long_family), **vars(files)}), **keys)
    results = run_engine({"model": long_family.target, **ENGINE, **drafters}, JOBS)
    assert not differing(results, plain)
    for i in range(len(levels)):
        # vLLM's own speculator, which counts no levels, drafts with a head alone.
        assert any(
            result["levels"][i]["drafted"]
            if result["levels"]
            else result["counters"]["spec_decode_num_draft_tokens"]
            for result in results.values()
        )
