"""Several lookups as one level: replayed as the reference engine drafts, and predicted."""

import itertools

import numpy as np
import pytest

from benchmarks.common import MODELS
from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.tools.planner.acceptance import measure_acceptance
from vllm_hsd.tools.planner.latencies import Latencies, LatencyTable
from vllm_hsd.tools.planner.lookup_choice import LookupChoice
from vllm_hsd.tools.planner.models import ModelSet
from vllm_hsd.tools.planner.predict import Measured, Selection, predict
from vllm_hsd.tools.planner.profile import Sampling
from vllm_hsd.tools.planner.prompt_lookup import replay_choice
from vllm_hsd.tools.planner.prompts import encode, read_prompts
from vllm_hsd.tools.planner.survival import Acceptance
from vllm_hsd.tools.planner.task import Task, candidates
from vllm_hsd.tools.planner.timing import Timing
from vllm_hsd.tools.reference import HuggingFaceLevel, ReferenceEngine

NGRAM, BIGRAM, TOGETHER, MID, TARGET = range(5)
TOKENS, LONGEST = 48, 6
LATENCIES = Latencies(forward=[LatencyTable(batch_sizes=[1], tokens=[1], ms=[[1.0]])] * 5)


@pytest.fixture(scope="module")
def models():
    store = str(MODELS / "library.safetensors")
    found = candidates(models=[str(MODELS / "mid")], ngram=3, bigram=store)
    assert [each.name for each in found] == ["ngram 3", "bigram", "ngram 3+bigram", "mid"]
    return ModelSet(str(MODELS / "target"), found)


@pytest.fixture(scope="module")
def contexts(models):
    prompts = read_prompts(MODELS / "prompts.jsonl")[:12]
    return [encode(models.tokenizer, prompt)[-64:] for prompt in prompts]


def engine_of(models, levels, lengths):
    lowest, *above = (models.models[i] for i in levels)
    drafters = [lowest.fresh(), *map(HuggingFaceLevel, above)]
    options = [LevelOptions(length) for length in lengths]
    return ReferenceEngine(HuggingFaceLevel(models.target), drafters, options)


@pytest.mark.parametrize("length", [1, 5])
def test_rounds_are_those_of_an_engine(models, contexts, length):
    """At temperature 0, with what is learned from earlier texts; one source alone drafts others."""
    engine, rounds = engine_of(models, [TOGETHER], [length]), []
    step = engine._chain_step

    def noted(*arguments):
        drafted, accepted, emitted = step(*arguments)
        rounds.append((drafted, accepted))
        return drafted, accepted, emitted

    engine._chain_step = noted
    texts, expected = [], []
    for context in contexts[:4]:
        rounds.clear()
        text = engine.generate(context, TOKENS, temperature=0).token_ids
        texts.append((np.array(context), np.array(text)))
        # At its end the engine requests fewer tokens.
        ends = itertools.accumulate(kept + 1 for _, kept in rounds)
        expected.append(
            [each for each, end in zip(rounds, ends, strict=True) if end + length < TOKENS]
        )
    assert sum(kept for each in expected for _, kept in each) > 40

    def replayed(choice):
        offered, accepted = replay_choice(choice, texts, length, committed=True)
        found = []
        for drafted, kept in zip(offered[-1], accepted[-1], strict=True):
            at = 0
            found.append([])
            while at < TOKENS:
                found[-1].append((int(drafted[at]), int(kept[at])))
                at += kept[at] + 1
        return [each[: len(want)] for each, want in zip(found, expected, strict=True)]

    choice = models.models[TOGETHER]
    assert replayed(choice) == expected
    for lookup in choice.lookups:
        assert replayed(LookupChoice([lookup], choice.min_acceptance)) != expected


@pytest.fixture(scope="module")
def measured(models, contexts):
    target = models.target.config.name_or_path
    task = Task(target, models.candidates, Sampling(temperature=0), LONGEST, TOKENS, 96)
    return measure_acceptance(models, contexts, task).tables


@pytest.mark.parametrize(
    "selection", [Selection((TOGETHER,), (4,)), Selection((TOGETHER, MID), (3, 6))], ids=str
)
def test_tokens_per_step_are_predicted(models, contexts, measured, selection):
    """On the texts of the profile; the tables of one source would miss it."""
    engine = engine_of(models, selection.levels, selection.draft_lengths)
    found = [engine.generate(context, TOKENS, temperature=0) for context in contexts]
    steps = sum(each.target_calls for each in found)
    ran = sum(len(each.token_ids) for each in found) / steps
    rows = np.sum([each.counts.rows for each in found], axis=0) / steps
    # A lookup makes one call for every draft that is asked for, a model one for every round.
    calls = [rows[0, Count.requested], *rows[1:, Count.forwards]]

    def predicted(lookup):
        tables = {TOGETHER: measured[f"lookup{lookup}"]}
        survival = measured["block"].copy()
        survival[:, TOGETHER] = survival[:, lookup]
        sets = Measured(LATENCIES, Acceptance(survival, tables))
        return predict(selection, sets, output_tokens=TOKENS)

    found = predicted(TOGETHER)
    assert found.tokens_per_step == pytest.approx(ran, rel=0.05)
    assert found.level_calls[:-1] == pytest.approx(calls, rel=0.06)
    other = predicted(BIGRAM)
    assert max(other.level_calls[-2] / calls[-1], ran / other.tokens_per_step) > 1.2


@pytest.mark.slow
def test_tokens_per_step_of_a_served_cascade_are_predicted(models, contexts, measured, tmp_path):
    """Of an engine, which lets tokens go that do not pay."""
    engine_args = {
        "dtype": "float32", "enforce_eager": True, "max_model_len": 256,
        "kv_cache_memory_bytes": 1 << 26,
    }  # fmt: skip
    target = str(MODELS / "target")
    task = Task(target, models.candidates, max_draft_tokens=LONGEST, engine_args=engine_args)
    timing = Timing(task, contexts, models.vocabulary, tmp_path)
    tables = {i: measured[f"lookup{i}"] for i in range(MID)}
    sets = Measured(LATENCIES, Acceptance(measured["block"], tables))
    params = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    with timing.engine(True) as engine:
        for levels, lengths in (((TOGETHER,), (2,)), ((TOGETHER,), (6,)), ((BIGRAM,), (4,))):
            engine.select_levels([0], lengths, timing.places[levels[0]][1])
            each = [engine.generate([context], params).target_steps[0] for context in contexts]
            steps = sum(each) - len(contexts)  # the prefill emits the first token
            served = len(contexts) * (TOKENS - 1) / steps
            found = predict(Selection(levels, lengths), sets, output_tokens=TOKENS)
            assert found.tokens_per_step == pytest.approx(served, rel=0.05)
