"""Seeded requests repeat, alone or in a batch; a request may have several sequences."""

import pytest
from support.engines import run_engine

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(90 + i)] for i in range(6)]
SEEDED = [
    {"max_tokens": 20, "ignore_eos": True, "seed": 100 + i, "temperature": 0.7 + 0.1 * i}
    for i in range(6)
]
OTHERS = [{**SEEDED[i], "seed": None, "temperature": i} for i in range(2)]
SEVERAL = {"max_tokens": 12, "ignore_eos": True, "n": 3}

JOBS = {
    **{f"alone {i}": {"prompts": [PROMPTS[i]], "params": SEEDED[i]} for i in range(6)},
    "together": {"prompts": PROMPTS + PROMPTS[:2], "params": SEEDED + OTHERS},
    "after other requests": {"prompts": PROMPTS[:2] + PROMPTS, "params": OTHERS + SEEDED},
    "joining": {
        "prompts": PROMPTS + PROMPTS[:2],
        "params": SEEDED + OTHERS,
        "arrive": [0, 3, 5, 6, 6, 9, 1, 2],
    },
    "other seeds": {"prompts": PROMPTS, "params": [{**p, "seed": 7} for p in SEEDED]},
    "no seeds": {"prompts": [PROMPTS[0]] * 4, "params": {**SEEDED[0], "seed": None}},
    "several": {"prompts": PROMPTS, "params": {**SEVERAL, "seed": 5}},
    "several again": {"prompts": PROMPTS[::-1], "params": {**SEVERAL, "seed": 5}},
    "several without a seed": {"prompts": PROMPTS, "params": SEVERAL},
}


@pytest.fixture(scope="module", params=["whole prompts", "prompts in chunks"])
def results(family, request):
    engine = {
        "model": family.target,
        "speculative_config": {
            "method": "hsd",
            "adaptive": False,
            "num_speculative_tokens": 4,
            "levels": [
                {"first_of": [{"ngram": {}}, {"model": family.small}], "num_tokens": 2},
                {"model": family.mid},
            ],
        },
    }
    if request.param == "prompts in chunks":
        # Eight requests of 4 drafts + 1 token just fit: the scheduler cuts prompts, not drafts.
        engine["max_num_batched_tokens"] = 40
        engine["max_num_seqs"] = 8
    return request.param, run_engine(engine, JOBS)


@pytest.fixture(scope="module")
def alone(family):
    """Token ids of each request alone in an engine that prefills whole prompts."""
    return {}


def ids(result) -> list[list[int]]:
    return [sequence["ids"] for output in result["outputs"] for sequence in output]


def test_alone_and_in_a_batch(results, alone):
    name, jobs = results
    expected = [ids(jobs[f"alone {i}"])[0] for i in range(6)]
    assert ids(jobs["together"])[:6] == expected
    assert ids(jobs["after other requests"])[2:] == expected
    assert ids(jobs["joining"])[:6] == expected
    # The engines differ only in how prompts are split.
    alone[name] = expected
    assert all(other == expected for other in alone.values())


def test_other_seeds_and_no_seed_differ(results):
    _, jobs = results
    one, other = ids(jobs["together"])[:6], ids(jobs["other seeds"])
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert len({tuple(sequence) for sequence in ids(jobs["no seeds"])}) == 4


def test_several_sequences(results):
    _, jobs = results
    for name in ("several", "several again", "several without a seed"):
        for output in jobs[name]["outputs"]:
            assert [len(sequence["ids"]) for sequence in output] == [12] * 3
            assert len({tuple(sequence["ids"]) for sequence in output}) == 3
    assert jobs["several"]["outputs"] == jobs["several again"]["outputs"][::-1]
