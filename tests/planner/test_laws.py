"""Measured laws: against direct computation, and against cascades that really run."""

import numpy as np
import pytest
import torch

from vllm_hsd.core.cascade import LevelOptions
from vllm_hsd.errors import UserError
from vllm_hsd.planner import laws as laws_module
from vllm_hsd.planner.costs import Costs, TimeTable
from vllm_hsd.planner.latency import Cascade, predict
from vllm_hsd.planner.laws import Effort
from vllm_hsd.planner.models import Family, Sampling
from vllm_hsd.planner.parts import Parts
from vllm_hsd.planner.theory import acceptance_rate, check_rates
from vllm_hsd.reference import HuggingFaceLevel, ReferenceEngine

EFFORT = Effort(text_tokens=48, contexts=192, max_tokens=6, batch=32)


def prompts(count, vocabulary):
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocabulary, size=rng.integers(3, 9)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def members(text_family):
    return Family(text_family.target, [text_family.small, text_family.mid], early_exits=[1])


@pytest.fixture(scope="module")
def measured(members, text_family, tmp_path_factory):
    parts = Parts(tmp_path_factory.mktemp("laws") / "parts", {})
    contexts = prompts(64, text_family.vocabulary)
    done = []
    laws = laws_module.measure(members, contexts, Sampling(), EFFORT, parts, done.append)
    assert len(done) == laws_module.batches(members, len(contexts), EFFORT)
    return laws


def test_rates_are_those_of_the_laws_on_the_same_contexts(members, text_family):
    contexts = prompts(3, text_family.vocabulary)
    part = laws_module._target_text(members, contexts, Sampling(0.8), EFFORT, (0, 0, 0))
    for row, context in enumerate(contexts):
        length = part["lengths"][row]
        text = part["tokens"][row, :length]
        whole = torch.tensor([[*context, *text[:-1]]])
        logits = members.logits(whole, len(context) - 1, range(4))
        laws = [torch.softmax(logits[m][0].double() / 0.8, -1).numpy() for m in range(4)]
        for i in range(4):
            for j in range(4):
                rate = acceptance_rate(laws[i], laws[j]).mean()
                assert part["rates"][row, i, j] == pytest.approx(rate, abs=1e-5)
            log_prob = np.log(laws[i][np.arange(length), text])
            assert part["log_probs"][i, row, :length] == pytest.approx(log_prob, abs=1e-3)
            entropy = -(laws[i] * np.log(laws[i])).sum(-1)
            assert part["entropies"][i, row, :length] == pytest.approx(entropy, abs=1e-4)
        assert np.isnan(part["log_probs"][:, row, length:]).all()


def test_matrices_have_the_shape_of_rates(measured):
    check_rates(measured.rates)
    assert measured.rates[0, 3] < measured.rates[1, 3] < 1  # more noise, fewer tokens
    assert np.all(measured.rate_errors < 0.03)
    for table in measured.survival.values():
        assert table.shape == (4, 4, 7, 7, 7)
        known = ~np.isnan(table[..., 0, 0, 0])
        assert known.sum() == 3 * 2 + 3  # candidates among themselves, and to the target
        assert np.all(np.diff(table[known], axis=-1) <= 1e-12)
    better, worse = measured.survival["block"], measured.survival["standard"]
    # Their rounds start at other positions, so single entries may differ a little.
    assert np.nanmin(better - worse) > -0.02
    # The first drafted token is accepted at the mean rate, whichever verifier looks at it.
    assert better[3, 1, 1, 0, 1] == pytest.approx(measured.rates[1, 3], abs=0.03)


@pytest.mark.parametrize(
    ("levels", "draft_lengths"),
    [((1,), (5,)), ((0, 1), (2, 5)), ((1, 0), (1, 3)), ((1, 0), (3, 6))],
)
def test_predicted_calls_are_those_of_cascades_that_run(
    measured, members, text_family, levels, draft_lengths
):
    """Tokens per target call and forwards per level, against the reference engine."""
    level_models = [HuggingFaceLevel(members.members[level]) for level in levels]
    plans = [LevelOptions(budget) for budget in draft_lengths]
    engine = ReferenceEngine(HuggingFaceLevel(members.target), level_models, plans)
    calls, forwards, tokens = [], [], []
    for seed, prompt in enumerate(prompts(24, text_family.vocabulary)):
        result = engine.generate(prompt, 40, seed=seed)
        calls.append(result.target_calls)
        tokens.append(len(result.token_ids))
        forwards.append([stats.forwards for stats in result.levels])
    costs = Costs(forward=[TimeTable(batch_sizes=[1], tokens=[1], ms=[[1.0]]) for _ in range(4)])
    predicted = predict(
        Cascade(levels, draft_lengths), costs, measured.survival["block"], output_tokens=41
    )
    per_call = np.array(tokens) / np.array(calls)
    error = 4 * per_call.std() / np.sqrt(len(calls))
    assert predicted.tokens_per_step == pytest.approx(sum(tokens) / sum(calls), abs=error)
    ran = np.sum(forwards, axis=0) / sum(calls)
    assert predicted.level_calls[:-1] == pytest.approx(ran, rel=0.06)


def test_a_candidate_is_asked_where_it_failed_and_not_where_it_was_right():
    """Greedy laws: a candidate that is right at tokens 1 and 2 of 6, drafts of 1 and 2 tokens."""
    right = np.array([[False, True, True, False, False, False]])
    log_probs = np.stack([np.where(right, 0.0, -np.inf), np.zeros(right.shape)])
    ratios = laws_module._after_prefill([{"log_probs": log_probs}])
    chances = laws_module._asked_at(ratios[0], 2)
    # The prefill makes token 0. Drafts of 1: one for token 1, whose bonus is token 2, then at
    # 3, 4 and 5. Drafts of 2: one for tokens 1 and 2, whose bonus is token 3, then at 4 and 5.
    ones, twos = np.array([[0, 1, 0, 1, 1, 1]]) / 4, np.array([[0, 1, 0, 0, 1, 1]]) / 3
    assert chances == pytest.approx((ones + twos) / 2)


def test_texts_without_a_second_token_are_one_sentence():
    log_probs = np.concatenate([np.zeros((2, 3, 1)), np.full((2, 3, 4), np.nan)], axis=-1)
    with pytest.raises(UserError, match="ends its text with the first token after every"):
        laws_module._after_prefill([{"log_probs": log_probs}])


def test_greedy_texts_are_accepted_as_far_as_they_agree(members, text_family, tmp_path):
    contexts = prompts(8, text_family.vocabulary)
    laws = laws_module.measure(
        members, contexts, Sampling(temperature=0), EFFORT, Parts(tmp_path / "parts", {})
    )
    assert set(np.unique(laws.entropies)) == {0.0}
    a, b = laws.survival["block"], laws.survival["standard"]
    assert np.allclose(a[3, :3], b[3, :3])


def test_wide_vocabularies_take_smaller_batches(members, monkeypatch):
    few = Effort(text_tokens=10, contexts=4, max_tokens=2, batch=8)
    assert laws_module.batches(members, 16, few) == 16 // 8 + 3
    one_text = 4 * members.target.config.vocab_size * 4 * 10
    monkeypatch.setattr(laws_module, "LOGITS_BYTES", 2 * one_text)
    assert laws_module.batches(members, 16, few) == 16 // 2 + 3 * 2


def test_a_token_just_outside_its_own_law_counts_as_drawn():
    drafter, verifier = [-1.0, -np.inf, -1.0], [-2.0, -np.inf, -np.inf]
    ratios = laws_module._ratios(np.array([[drafter], [verifier]]), 1)
    assert ratios[0, 0].tolist() == [1.0, -np.inf, 13.0]


def test_a_measurement_continues_where_it_stopped(members, text_family, tmp_path):
    contexts = prompts(8, text_family.vocabulary)
    whole = laws_module.measure(
        members, contexts, Sampling(), EFFORT, Parts(tmp_path / "whole", {})
    )
    stops = iter(range(5))

    def interrupt(what):
        if next(stops, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        parts = Parts(tmp_path / "half", {"seed": 0})
        laws_module.measure(members, contexts, Sampling(), EFFORT, parts, interrupt)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "half").glob("*.npz")}
    assert len(kept) == 6
    again = Parts(tmp_path / "half", {"seed": 0})
    resumed = laws_module.measure(members, contexts, Sampling(), EFFORT, again)
    assert np.array_equal(resumed.rates, whole.rates)
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items())
    with pytest.raises(UserError, match="unfinished measurement with other settings"):
        Parts(tmp_path / "half", {"seed": 1})
    again.delete()
    assert not (tmp_path / "half").exists()
