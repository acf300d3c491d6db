"""Counts per level on their way from the worker to the front end."""

from types import SimpleNamespace

import pytest
from support import neighbours
from support.engines import run_engine
from support.level_files import cascade

from vllm_hsd.cascade.counters import Count, LevelCounts
from vllm_hsd.host import metrics
from vllm_hsd.tools import level_metrics

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(5 + 9 * i)] for i in range(6)]
JOBS = {
    "seeded": {"prompts": PROMPTS, "params": {"max_tokens": 20, "ignore_eos": True, "seed": 1}},
    "greedy": {"prompts": PROMPTS, "params": {"temperature": 0, "max_tokens": 30}},
    # Requests without seeds repeat too, as long as they come in the same order.
    "unseeded": {"prompts": PROMPTS, "params": {"max_tokens": 20, "ignore_eos": True}},
}


@pytest.fixture(scope="module")
def results(family):
    levels = {"model": family.small, "num_tokens": 2}, {"model": family.mid}
    return run_engine({"model": family.target, **cascade(*levels)}, JOBS)


def test_an_engine_with_more_levels_after_another_in_a_process(monkeypatch):
    now = [{"drafted": 5.0}, {"drafted": 3.0}]
    monkeypatch.setattr(level_metrics, "level_counts", lambda: now)
    assert level_metrics.counted_since([{"drafted": 4.0}]) == [{"drafted": 1.0}, {"drafted": 3.0}]


@pytest.mark.parametrize("job", JOBS)
def test_counts_fit_together(results, job):
    levels, counters = results[job]["levels"], results[job]["counters"]
    for level in levels:
        assert 0 < level["accepted"] < level["drafted"]
        assert 0 < level["rounds"] <= level["drafted"] and level["forwards"] > 0
        assert level["rounds"] <= level["requested"] - level["empty"]
        assert level["seconds"] >= level["forward_seconds"] > 0
    assert levels[0]["drafted"] <= 2 * levels[0]["rounds"]
    assert levels[1]["accepted"] == counters["spec_decode_num_accepted_tokens"]
    tokens = sum(len(out[0]["ids"]) for out in results[job]["outputs"])
    # Every target call adds one token of its own; a draft may reach past the last one.
    assert tokens <= levels[1]["accepted"] + levels[1]["rounds"] + 2 * len(PROMPTS) + 12


def counted(*rows: dict[str, int], sources: tuple[str, ...] = ()) -> LevelCounts:
    counts = LevelCounts.zeros(len(rows) - len(sources), sources)
    for row, given in zip(counts.rows, rows, strict=True):
        for name, value in given.items():
            row[Count[name]] = value
    return counts


LEVEL = {"drafted": 8, "accepted": 4, "rounds": 3, "forwards": 9, "requested": 4, "empty": 1}
LEVEL |= {"forward_ns": 250_000_000, "ns": 500_000_000}
NGRAM, MODEL = {"drafted": 6, "accepted": 3}, {"drafted": 2}
NOTHING = "level 1: drafted 0, accepted 0 (nan%), rounds 0, forwards 0"
LINE = (
    "level 0: drafted 16, accepted 8 (50.0%), mean length 2.0, none for 25.0%, 1.00 s, "
    "rounds 6, forwards 18 in 0.50 s"
)


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (counted(LEVEL, {}), f"{LINE}; {NOTHING}"),
        (counted(LEVEL, NGRAM, MODEL, sources=("n", "m")), f"{LINE}, n 6 of 12, m 0 of 4"),
        (counted(LEVEL, NGRAM, {}, sources=("n", "m")), f"{LINE}, n 6 of 12"),
    ],
)
def test_totals_add_up_and_print(counts, line):
    owner = SimpleNamespace()
    assert metrics._take(owner) is None
    metrics._add(owner, counts)
    metrics._add(owner, counts)
    totals = metrics._take(owner)
    assert (totals.rows == 2 * counts.rows).all() and counts.rows[0, Count.drafted] == 8
    assert metrics._take(owner) is None
    assert metrics.log_line(totals) == line


def places(llm, prompt: list[int]) -> tuple[list[int], list[int], int, int]:
    """Accepted tokens by place; of a request their histogram, places and drafted tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    own = output.outputs[0].spec_decode_metrics
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    [accepted] = [metric.values for metric in llm.get_metrics() if metric.name == name]
    return accepted, own.histogram, own.num_spec_tokens, own.num_draft_tokens


def test_branches_have_no_places_of_their_own():
    """A draft of five has five places; tokens of branches count as drafted."""
    level = {"sources": [{"ngram": {"max": 3}}, {"ngram": {"max": 1}}], "branches": 4}
    engine = {"model": neighbours.ENGINE["model"], "block_size": 32, "max_num_seqs": 4}
    engine |= {"per_request_spec_decode_metrics": "summary", **cascade(level)}
    prompt = neighbours.tokens(neighbours.LOOP)
    accepted, histogram, longest, drafted = run_engine(engine, prompt, work=places)
    assert len(accepted) == longest == 5 and len(histogram) == 6
    assert sum(accepted) == sum(n * count for n, count in enumerate(histogram)) > 0
    assert drafted > 5 * sum(histogram) / 2
