"""Whole engines: sampled text of cascades follows the target, by chi-square; with controls."""

import pytest
from support.cascades import cascade, configuration, target_of
from support.engines import ids, run_engine
from support.exact_joint_distribution import chi_square_p_value, joint_distribution

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
PROMPT = [2, 3, 0, 1]


def p_values(
    target: str,
    speculative_config: dict,
    cases: dict[str, dict],
    count: int = 300,
    patch: str | None = None,
) -> dict[str, float]:
    """Case -> chi-square p-value of three sampled tokens against their joint distribution.

    Args:
        cases: name -> sampling parameters.
        count: texts of each case, without seeds.
    """
    jobs = {
        case: {
            "prompts": [PROMPT] * count,
            "params": {"max_tokens": 4, "ignore_eos": True, **params},
        }
        for case, params in cases.items()
    }
    # Tokens for drafts of all requests at once.
    engine = {"model": target, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    engine["speculative_config"] = speculative_config
    results = run_engine(engine, jobs, patch=patch)
    found = {
        case: chi_square_p_value(
            [tuple(text[:3]) for text in ids(results[case])],
            joint_distribution(target, PROMPT, 3, params),
        )
        for case, params in cases.items()
    }
    print(found)
    return found


# More samples of other cascades: test_sampled_distribution.py, test_level_kinds.py.
@pytest.mark.parametrize("name", ["suffix, model", "mtp", "stock model", "stock head"])
def test_sampled_text_follows_the_target(name, small_vocabulary):
    target, config = target_of(name, small_vocabulary), configuration(name, small_vocabulary)
    found = p_values(target, config, {"temperature 1": {}, "top_p": {"top_p": 0.8}})
    assert min(found.values()) > 1e-6, found


@pytest.mark.parametrize(
    ("patch", "fault"),
    [("install", False), ("install_lowest", False), ("install_lowest_and_keep_rows", True)],
)
def test_sampled_text_of_levels_that_draft_now_and_then(patch, fault, small_vocabulary):
    """With a negative control: a lookup's tokens that a level passes on have other rows."""
    levels = [{"ngram": {"min": 1, "max": 2}, "num_tokens": 2}, {"model": small_vocabulary.mid}]
    speculative = {**cascade(levels), "adaptive": True}
    params = {"max_tokens": 9, "top_k": 2} if fault else {"max_tokens": 9}
    patch, cases = f"support.adversarial_depth:{patch}", {"": params}
    target = small_vocabulary.target
    found = p_values(target, speculative, cases, 2000, patch)[""]
    assert found < 1e-6 if fault else found > 1e-6


@pytest.mark.parametrize("name", ["two models", "lookup, exit, model", "stock model", "stock head"])
def test_wrong_rows_of_the_drafts_are_caught(name, small_vocabulary):
    """The negative control; two tokens to choose from make it sharper."""
    config, patch = configuration(name, small_vocabulary), "benchmarks.gpu.faults:install"
    found = p_values(small_vocabulary.target, config, {"top_k": {"top_k": 2}}, 600, patch)
    assert found["top_k"] < 1e-6


@pytest.mark.parametrize("fault", [False, True])
def test_sampled_text_of_a_lookup_or_a_head(fault, small_vocabulary):
    """With a negative control: a lookup's tokens are verified as if the head had drawn them."""
    target, speculative = small_vocabulary.target, configuration("n-gram or head", small_vocabulary)
    params, count, patch = {}, 300, "support.forced_choice:install"
    if fault:
        params, count, patch = {"top_k": 2}, 600, f"{patch}_drawn_lookups"
    found = p_values(target, speculative, {"": params}, count, patch)[""]
    assert found < 1e-6 if fault else found > 1e-6
