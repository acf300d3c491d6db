"""Whole engines: sampled text of cascades follows the target, by chi-square; with controls."""

import pytest
from support.cascades import cascade, configuration, target_of
from support.engines import ids, run_engine
from support.exact_joint_distribution import chi_square_p_value, joint_distribution

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
PROMPT = [2, 3, 0, 1]
# A sound engine fails with this probability; two tokens to choose from make controls sharper.
SIGNIFICANCE, TWO = 1e-6, {"top_k": 2}


def p_value(
    target: str, config: dict, *cases: dict, count: int = 300, patch: str | None = None
) -> float:
    """The least, of sampling parameters each: three tokens against their joint distribution."""
    shared = {"max_tokens": 4, "ignore_eos": True}
    jobs = {str(c): {"prompts": [PROMPT] * count, "params": {**shared, **c}} for c in cases}
    # Tokens for drafts of all requests at once.
    engine = {"model": target, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    results = run_engine({**engine, "speculative_config": config}, jobs, patch=patch)
    found = []
    for case in cases:
        samples = [tuple(text[:3]) for text in ids(results[str(case)])]
        exact = joint_distribution(target, PROMPT, 3, case)
        found.append(chi_square_p_value(samples, exact))
    print(found)
    return min(found)


# More samples of other cascades: test_sampled_distribution.py, test_level_kinds.py.
@pytest.mark.parametrize("name", ["suffix, model", "mtp", "stock model", "stock head"])
def test_sampled_text_follows_the_target(name, small_vocabulary):
    target, config = target_of(name, small_vocabulary), configuration(name, small_vocabulary)
    assert p_value(target, config, {}, {"top_p": 0.8}) > SIGNIFICANCE


# Of a head alone: test_head_levels.py.
@pytest.mark.parametrize("name", ["two models", "lookup, exit, model", "stock model"])
def test_wrong_rows_of_the_drafts_are_caught(name, small_vocabulary):
    target, config = small_vocabulary.target, configuration(name, small_vocabulary)
    patch = "benchmarks.gpu.faults:install"
    assert p_value(target, config, TWO, count=600, patch=patch) < SIGNIFICANCE


@pytest.mark.parametrize(
    ("patch", "fault"),
    [("install", False), ("install_lowest", False), ("install_lowest+keep_rows", True)],
)
def test_sampled_text_of_levels_that_draft_now_and_then(patch, fault, small_vocabulary):
    """With a negative control: a lookup's tokens that a level passes on have other rows."""
    levels = [{"ngram": {"min": 1, "max": 2}, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    config, case = (
        {**cascade(levels), "adaptive": True},
        {"max_tokens": 9, **(TWO if fault else {})},
    )
    patch = f"support.adversarial_depth:{patch}"
    found = p_value(small_vocabulary.target, config, case, count=2000, patch=patch)
    assert (found < SIGNIFICANCE) == fault


@pytest.mark.parametrize(
    ("patch", "fault"), [("force_sources", False), ("force_sources+draw_lookups", True)]
)
def test_sampled_text_of_a_lookup_or_a_head(patch, fault, small_vocabulary):
    """With a negative control: a lookup's tokens are verified as if the head had drawn them."""
    target, config = small_vocabulary.target, configuration("n-gram or head", small_vocabulary)
    case, count, patch = (
        TWO if fault else {},
        600 if fault else 300,
        f"support.adversarial_depth:{patch}",
    )
    assert (p_value(target, config, case, count=count, patch=patch) < SIGNIFICANCE) == fault
