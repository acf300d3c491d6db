"""`rejection_sample_method: "hierarchical"` on the V2 runner, whole engines, interpreted."""

import pytest
from support.eagle3_head import write_eagle3_head
from support.stock_heads import write_mtp_target

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
    if name == "mtp":
        return MTP
    return hierarchical("ngram_gpu", prompt_lookup_max=3, prompt_lookup_min=1)


MTP = {"method": "hsd", "num_speculative_tokens": 2, "levels": [{"mtp": {}}]}


def target_of(name: str, family, directory) -> str:
    """The target, with a layer that drafts for it if that is asked for."""
    return write_mtp_target(family.target, directory / "mtp") if name == "mtp" else family.target


@pytest.mark.parametrize(
    "name",
    [
        "draft_model, sampled",
        pytest.param("draft_model, argmax", marks=pytest.mark.slow),
        pytest.param("eagle3", marks=pytest.mark.slow),
        pytest.param("mtp", marks=pytest.mark.slow),
        pytest.param("ngram_gpu", marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_that_of_no_speculation(name, family, greedy_tokens, tmp_path):
    from support.v2_engines import run_greedy_and_mixed

    config = drafter(name, family, tmp_path)
    mixed = run_greedy_and_mixed(target_of(name, family, tmp_path), config, greedy_tokens)
    assert len(mixed["outputs"][1][0]["logprobs"]) == 9
    counters = mixed["counters"]
    drafted = counters["spec_decode_num_draft_tokens"]
    assert drafted > 0
    if name == "draft_model, sampled":  # the target itself
        assert counters["spec_decode_num_accepted_tokens"] == drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model, sampled", "eagle3", "mtp", "ngram_gpu"])
def test_seeded_text_is_that_of_plain_vllm(name, family, seeded_tokens, tmp_path):
    from support.v2_engines import run_seeded

    config = drafter(name, family, tmp_path)
    texts, counters = run_seeded(target_of(name, family, tmp_path), config)
    assert texts == seeded_tokens
    accepted, drafted = (counters[f"spec_decode_num_{n}_tokens"] for n in ("accepted", "draft"))
    assert drafted > 0
    if name == "draft_model, sampled":
        # The target itself with the same noise; its drafts know nothing of penalties.
        assert accepted > drafted // 2


def sampling(name: str, family, directory) -> dict:
    """A drafter that keeps the rows of its drafts."""
    if name == "mtp":
        return MTP
    model = family.small if name == "draft_model" else write_eagle3_head(family.target, directory)
    return hierarchical(name, 3, model=model, draft_sample_method="probabilistic")


PROMPT = [2, 3, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle3", "mtp"])
def test_sampled_text_follows_the_target(name, small_vocabulary, tmp_path):
    from support.v2_engines import check_samples

    speculative = sampling(name, small_vocabulary, tmp_path)
    check_samples(target_of(name, small_vocabulary, tmp_path), speculative, PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_wrong_rows_of_the_drafts_are_caught(name, small_vocabulary, tmp_path):
    from support.v2_engines import check_wrong_rows

    speculative = sampling(name, small_vocabulary, tmp_path)
    check_wrong_rows(small_vocabulary.target, speculative, PROMPT)
