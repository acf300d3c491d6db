"""`rejection_sample_method: "hierarchical"` on the V2 runner, whole engines, interpreted."""

import pytest
from support import engines
from support.eagle3_head import write_eagle3_head
from support.exact_joint_distribution import chi_square_p_value, joint_distribution

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(3 + 9 * i)] for i in range(4)]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
JOBS = {
    "greedy": {"prompts": PROMPTS, "params": GREEDY},
    "mixed": {
        "prompts": PROMPTS,
        "params": [
            GREEDY,
            {**GREEDY, "temperature": 0.7, "logprobs": 2},
            {**GREEDY, "temperature": 1},
            {**GREEDY, "temperature": 1.3},
        ],
    },
    "joining": {"prompts": PROMPTS, "params": GREEDY, "arrive": [0, 2, 3, 5]},
}
pytestmark = [pytest.mark.interpret, pytest.mark.timeout(900)]


def hierarchical(method: str, tokens: int = 4, **keys) -> dict:
    return {
        "method": method,
        "num_speculative_tokens": tokens,
        "rejection_sample_method": "hierarchical",
        **keys,
    }


def drafter(name: str, family, directory) -> dict:
    """Speculative configuration of a drafter."""
    if name == "draft_model, sampled":
        return hierarchical("draft_model", model=family.target, draft_sample_method="probabilistic")
    if name == "draft_model, argmax":
        return hierarchical("draft_model", model=family.mid, draft_sample_method="greedy")
    if name == "eagle3":
        head = write_eagle3_head(family.target, directory)
        return hierarchical("eagle3", model=head, draft_sample_method="probabilistic")
    return hierarchical("ngram_gpu", prompt_lookup_max=3, prompt_lookup_min=1)


@pytest.fixture(scope="module")
def plain(family):
    """Tokens without speculation, on the V1 runner."""
    jobs = {"greedy": JOBS["greedy"]}
    found = engines.run_engine({"model": family.target}, jobs)["greedy"]["outputs"]
    return [output[0]["ids"] for output in found]


@pytest.mark.parametrize(
    "name",
    [
        "draft_model, sampled",
        pytest.param("draft_model, argmax", marks=pytest.mark.slow),
        pytest.param("eagle3", marks=pytest.mark.slow),
        pytest.param("ngram_gpu", marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_that_of_no_speculation(name, family, plain, tmp_path):
    from support.v2_engines import run_engine

    # Prompts are prefilled in chunks of at most 16 tokens.
    engine = {"model": family.target, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    results = run_engine({**engine, "speculative_config": drafter(name, family, tmp_path)}, JOBS)
    for job in ("greedy", "joining"):
        assert [output[0]["ids"] for output in results[job]["outputs"]] == plain
    assert results["mixed"]["outputs"][0][0]["ids"] == plain[0]
    assert len(results["mixed"]["outputs"][1][0]["logprobs"]) == 12
    counters = results["mixed"]["counters"]
    drafted = counters["spec_decode_num_draft_tokens"]
    assert drafted > 0
    if name == "draft_model, sampled":  # the target itself
        assert counters["spec_decode_num_accepted_tokens"] == drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_sampled_text_follows_the_target(name, small_vocabulary, tmp_path):
    from support.v2_engines import run_engine

    family, count = small_vocabulary, 400
    model = family.small if name == "draft_model" else write_eagle3_head(family.target, tmp_path)
    speculative = hierarchical(name, 3, model=model, draft_sample_method="probabilistic")
    cases = {"temperature 1": {}, "top_p": {"top_p": 0.8}}
    jobs = {
        case: {
            "prompts": [[2, 3, 0]] * count,
            "params": [
                {"max_tokens": 4, "ignore_eos": True, "seed": i, **params} for i in range(count)
            ],
        }
        for case, params in cases.items()
    }
    engine = {"model": family.target, "max_num_seqs": 64, "speculative_config": speculative}
    results = run_engine(engine, jobs)
    for case, params in cases.items():
        texts = [tuple(output[0]["ids"][:3]) for output in results[case]["outputs"]]
        probs = joint_distribution(family.target, [2, 3, 0], 3, params)
        assert chi_square_p_value(texts, probs) > 1e-6, case
