"""Measured acceptance: against direct computation, and against cascades that really run."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner import acceptance
from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.measure import Stages
from vllm_hsd.tools.planner.models import ModelSet
from vllm_hsd.tools.planner.predict import Measured, Selection, predict
from vllm_hsd.tools.planner.profile import Sampling
from vllm_hsd.tools.planner.prompt_lookup import propose
from vllm_hsd.tools.planner.survival import Acceptance
from vllm_hsd.tools.planner.task import Task, candidates
from vllm_hsd.tools.reference import HuggingFaceLevel, ReferenceEngine

NGRAM, PAIRS, SMALL, MID, EXIT, TARGET = range(6)


def prompts(count, vocabulary):
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocabulary, size=rng.integers(3, 9)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def task(text_family, tmp_path_factory):
    """Every kind of candidate that reads no trained head."""
    path = tmp_path_factory.mktemp("store") / "pairs.safetensors"
    size = text_family.vocabulary
    documents = [np.random.default_rng(1).integers(size, size=4000)]
    write_store(collect_texts(documents, size), str(path))
    small_and_mid = [text_family.small, text_family.mid]
    found = candidates(models=small_and_mid, exits=[1], bigram_model=str(path), ngram=3)
    sizes = {"max_draft_tokens": 6, "text_tokens": 48, "contexts": 128, "texts_per_forward": 32}
    return Task(text_family.target, found, **sizes)


@pytest.fixture(scope="module")
def models(task):
    return ModelSet(task.target, task.candidates)


@pytest.fixture(scope="module")
def measured(models, task, text_family):
    contexts, done = prompts(64, text_family.vocabulary), []
    found = acceptance.measure_acceptance(models, contexts, task, done.append)
    assert len(done) == acceptance.num_batches(models, len(contexts), task)
    return found


def test_rates_are_those_of_the_probabilities_on_the_same_contexts(models, task, text_family):
    contexts = prompts(3, text_family.vocabulary)
    cooler = replace(task, sampling=Sampling(temperature=0.8))
    texts = acceptance.scored_texts(models, TARGET, contexts, cooler, (0, 0, 0))
    for row, context in enumerate(contexts):
        length = texts.lengths[row]
        text = texts.tokens[row, :length]
        whole = torch.tensor([[*context, *text[:-1]]])
        logits = models.logits(whole, len(context) - 1, range(1, 6))
        probs = {m: torch.softmax(logits[m][0].double() / 0.8, -1).numpy() for m in logits}
        for i in probs:
            for j in probs:
                rate = np.minimum(probs[i], probs[j]).sum(-1).mean()
                assert texts.rates[row, i, j] == pytest.approx(rate, abs=1e-5)
            log_prob = np.log(probs[i][np.arange(length), text])
            assert texts.log_probs[i, row, :length] == pytest.approx(log_prob, abs=1e-3)
        for position in range(length):
            proposal = propose(np.array([*context, *text[:position]]), 1, 3, 6)
            assert texts.offered[NGRAM][row, position] == len(proposal)
    assert np.isnan(texts.rates[:, NGRAM]).all() and np.isnan(texts.log_probs[NGRAM]).all()


SELECTIONS = {
    "mid": Selection((MID,), (5,)),
    "small > mid": Selection((SMALL, MID), (2, 5)),
    "pairs": Selection((PAIRS,), (3,)),
    "pairs > mid": Selection((PAIRS, MID), (2, 5)),
}


@pytest.mark.parametrize("selection", SELECTIONS.values(), ids=SELECTIONS)
def test_predicted_calls_are_those_of_cascades_that_run(measured, models, text_family, selection):
    """Tokens per target call and forwards per level, against the reference engine."""
    check_prediction(measured, models, text_family.vocabulary, selection)


def test_a_suffix_lookup_is_predicted(task, text_family):
    store = task.candidates[PAIRS].keys()["bigram_model"]
    found = candidates(models=[text_family.mid], suffix=store)
    models, task = ModelSet(task.target, found), replace(task, candidates=found)
    contexts = prompts(64, text_family.vocabulary)
    measured = acceptance.measure_acceptance(models, contexts, task)
    for selection in (Selection((0,), (4,)), Selection((0, 1), (2, 5))):
        check_prediction(measured, models, text_family.vocabulary, selection)


def check_prediction(measured, models, vocabulary, selection):
    found = [models.models[level] for level in selection.levels]
    levels = [HuggingFaceLevel(m) if isinstance(m, torch.nn.Module) else m for m in found]
    options = [LevelOptions(length) for length in selection.draft_lengths]
    engine = ReferenceEngine(HuggingFaceLevel(models.target), levels, options)
    texts = [engine.generate(p, 30, seed=i) for i, p in enumerate(prompts(12, vocabulary))]
    calls = np.array([each.target_calls for each in texts])
    tokens = np.array([len(each.token_ids) for each in texts])
    table = LatencyTable(batch_sizes=[1], tokens=[1], ms=[[1.0]])
    latencies = Latencies(forward=[table] * len(models.models))
    found = Acceptance(measured.tables["block"], {NGRAM: measured.tables["lookup0"]})
    predicted = predict(selection, Measured(latencies, found), output_tokens=31)
    error = 4 * (tokens / calls).std() / np.sqrt(len(calls))
    assert predicted.tokens_per_step == pytest.approx(tokens.sum() / calls.sum(), abs=error)
    ran = sum(each.counts.rows[:, Count.forwards] for each in texts) / calls.sum()
    # A lookup makes no forward pass.
    first = int(selection.levels[0] not in models.with_probabilities)
    assert predicted.level_calls[first:-1] == pytest.approx(ran[first:], rel=0.08)


def test_a_finished_stage_is_kept_and_another_measurement_refused(measured, tmp_path):
    stages = Stages(tmp_path / "partial", "one")
    assert stages.load_acceptance() is None
    stages.save_acceptance(measured)
    again = Stages(tmp_path / "partial", "one").load_acceptance()
    assert again.positions == measured.positions
    assert np.array_equal(again.rates, measured.rates, equal_nan=True)
    assert all(np.array_equal(again.tables[k], table) for k, table in measured.tables.items())
    with pytest.raises(UserError, match="unfinished measurement with other settings"):
        Stages(tmp_path / "partial", "another")
