"""The demo: its arithmetic and its files without engines, and once as a whole."""

import csv
import io
from collections import Counter

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress

from vllm_hsd.cli import demo, demo_report
from vllm_hsd.cli.demo import Choice, Contender, Sample, Setting
from vllm_hsd.engine_runs import EngineError, EngineProcess, Run

ROLES = ("none", "single", "cascade")
CONTENDERS = [
    Contender("none", "none"),
    Contender("single", "single", [1]),
    Contender("cascade", "cascade", [0, 1]),
]


def make_run(seconds=1.0, token_ids=(1, 2, 3, 4), accepted=0, levels=()):
    return Run(seconds, seconds / 2, [list(token_ids)], ["text"], accepted, list(levels))


def make_level(drafted, accepted):
    return {"drafted": drafted, "accepted": accepted}


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path, {}, CONTENDERS, ["a", "b"], ["c"], tmp_path, "the target is a toy")


@pytest.fixture
def choices():
    return {
        temperature: {
            contender.role: Choice(contender, [3] * len(contender.levels))
            for contender in CONTENDERS
        }
        for temperature in (0.0, 1.0)
    }


def make_samples(seconds, **changes):
    """One sample per role, temperature, round and prompt; `seconds[role][round]`."""
    levels = {
        "none": [],
        "single": [make_level(0, 0), make_level(4, 2)],
        "cascade": [make_level(6, 3)] * 2,
    }
    accepted = {"none": 0, "single": 2, "cascade": 3}
    return [
        Sample(
            role,
            temperature,
            round_,
            prompt,
            make_run(seconds[role][round_], accepted=accepted[role], levels=levels[role]),
        )
        for role in ROLES
        for temperature in (0.0, 1.0)
        for round_ in range(3)
        for prompt in range(2)
    ]


SECONDS = {"none": [4.0, 4.0, 8.0], "single": [2.0, 1.0, 2.0], "cascade": [1.0, 1.0, 1.0]}


def test_calls_of_the_target_are_tokens_less_those_accepted():
    run = make_run(token_ids=range(10), accepted=6)
    assert run.tokens == 10 and run.target_calls == 4


def test_rows_compare_rates_of_the_same_round(choices):
    rows = demo_report.summarise(0.0, choices[0.0], make_samples(SECONDS))
    none, single, cascade = rows
    assert none.tokens_per_second.median == 1.0  # 4 tokens in 4 s
    assert (single.to_none.low, single.to_none.median, single.to_none.high) == (2.0, 4.0, 4.0)
    ratios = cascade.to_single
    assert (ratios.low, ratios.median, ratios.high) == (1.0, 2.0, 2.0)
    assert [row.block_efficiency for row in rows] == [1.0, 2.0, 4.0]
    assert [row.acceptance for row in rows] == [[], [0.5], [0.5, 0.5]]


def test_report_writes_csv_and_png_and_ends_with_status_0(setting, choices):
    console = Console(file=io.StringIO(), width=200)
    assert demo_report.report(setting, choices, make_samples(SECONDS), console) == 0
    printed = console.file.getvalue()
    assert "4.00" in printed and "(4.00-8.00)" in printed
    assert "the target is a toy" in printed
    assert "Greedy outputs are equal" in printed
    assert "wall time 2.0 times CPU" in printed
    with (setting.out / "demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["temperature"], row["role"]) for row in rows] == [
        (temperature, role) for temperature in ("0.0", "1.0") for role in ROLES
    ]
    assert rows[2]["to_none_median"] == "4.0000" and rows[2]["note"] == "the target is a toy"
    assert rows[2]["cpu_to_none_median"] == "4.0000"
    assert (setting.out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_greedy_outputs_that_differ_end_with_status_1(setting, choices):
    samples = make_samples(SECONDS)
    index = next(i for i, s in enumerate(samples) if s.role == "cascade" and s.temperature == 0.0)
    changed = make_run(token_ids=(1, 2, 9, 4), accepted=3, levels=samples[index].run.levels)
    samples[index] = Sample("cascade", 0.0, 0, 0, changed)
    console = Console(file=io.StringIO(), width=200)
    assert demo_report.report(setting, choices, samples, console) == 1
    assert "cascade, prompt 0, round 0, from token 2 on" in console.file.getvalue()


def test_sampled_outputs_may_differ():
    samples = make_samples(SECONDS)
    different = [
        Sample(s.role, 1.0, s.round, s.prompt, make_run(token_ids=(i, i)))
        for i, s in enumerate(samples)
    ]
    assert demo_report.greedy_differences(different) == []


class FakeEngine:
    """Takes the seconds that its levels and draft_lengths say, and counts its runs."""

    def __init__(self, seconds):
        self.seconds, self.in_use, self.runs = seconds, (None, None), Counter()

    def use(self, draft_lengths, levels):
        self.in_use = tuple(levels), draft_lengths

    def generate(self, prompts, temperature, max_tokens, seed):
        levels, draft_lengths = self.in_use
        self.runs[levels] += 1
        return make_run(self.seconds(levels, draft_lengths, seed))


def speculating_seconds(levels, draft_lengths, seed):
    if levels == (0,):
        # The fastest on the first prompts, the slowest on the later ones.
        return 0.1 if seed < 2 else 5.0
    return len(levels) / draft_lengths[0]


@pytest.fixture
def step(tmp_path):
    contenders = [
        Contender("none", "none"),
        Contender("small", "single", [0], [[2], [3]]),
        Contender("mid", "single", [1], [[2], [4]]),
        Contender("both", "cascade", [0, 1], [[1, 2], [2, 4]]),
    ]
    prompts = [str(i) for i in range(5)]
    setting = Setting(tmp_path, {}, contenders, ["a", "b"], prompts, tmp_path, "a toy")
    engines = {
        "plain": FakeEngine(lambda levels, draft_lengths, seed: 1.0),
        "speculating": FakeEngine(speculating_seconds),
    }
    with Progress(console=Console(file=io.StringIO())) as progress:
        yield demo._Step(setting, engines, 0.0, progress, progress.add_task("", total=None))


def test_the_sweep_takes_the_fastest_of_each_role_over_all_tuning_prompts(step):
    chosen = step.choose()
    assert {role: (c.contender.name, c.draft_lengths) for role, c in chosen.items()} == {
        "none": ("none", []),
        "single": ("mid", [4]),
        "cascade": ("both", [2, 4]),
    }
    # Both of small and the better of mid went on from the first 2 prompts to the other 3.
    assert step.engines["plain"].runs.total() == 0
    assert step.engines["speculating"].runs == {(0,): 2 * 5, (1,): 2 + 5, (0, 1): 2 * 5}


def test_all_roles_take_turns_on_every_prompt_with_the_same_seed(step):
    samples = step.measure(step.choose())
    assert len(samples) == 3 * 3 * 2
    assert [s.role for s in samples[:6]] == [
        "none", "single", "cascade", "single", "cascade", "none",
    ]  # fmt: skip


def test_the_progress_bar_counts_every_call_of_an_engine(step):
    step.measure(step.choose())
    calls = sum(engine.runs.total() for engine in step.engines.values())
    first_runs = len(step.engines)
    temperatures = len(step.setting.temperatures)
    assert step.setting.runs == first_runs + temperatures * calls


def test_outside_a_clone_the_demo_says_what_to_do(tmp_path):
    with pytest.raises(demo.DemoError, match=r"no models in .* `make demo` there\."):
        demo.family_setting(tmp_path)


@pytest.mark.slow
def test_the_whole_demo_on_untrained_models(text_family, tmp_path):
    setting = Setting(
        target=text_family.target,
        speculative_config={
            "method": "hsd",
            "num_speculative_tokens": 4,
            "levels": [{"model": text_family.small, "num_tokens": 3}, {"model": text_family.mid}],
        },
        contenders=[
            Contender("no speculation", "none"),
            Contender("small alone", "single", [0], [[2], [3]]),
            Contender("mid alone", "single", [1], [[2]]),
            Contender("both", "cascade", [0, 1], [[1, 3], [2, 4]]),
        ],
        prompts=["def f(", "import "],
        tuning_prompts=["class A"],
        out=tmp_path,
        note="untrained models",
        max_tokens=12,
        tuning_tokens=8,
        rounds=2,
    )
    console = Console(file=io.StringIO(), width=200)
    assert demo.run(setting, console) == 0, console.file.getvalue()
    with (tmp_path / "demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    assert all(float(row["tokens_per_second_low"]) > 0 for row in rows)
    cascade = [row for row in rows if row["role"] == "cascade"]
    assert all(1 <= float(row["block_efficiency"]) <= 5 for row in cascade)
    assert all(len(row["acceptance"].split()) == 2 for row in cascade)
    assert all(
        0 <= rate <= 1 for row in cascade for rate in np.fromstring(row["acceptance"], sep=" ")
    )


@pytest.mark.slow
def test_an_engine_that_cannot_start_is_named_with_its_log(tmp_path):
    log = tmp_path / "log"
    log.write_text("of an earlier engine")
    with (
        EngineProcess("broken", tmp_path / "nowhere", None, log) as engine,
        pytest.raises(EngineError, match=r"engine 'broken'.*log"),
    ):
        engine.generate(["a"], 0.0, 4)
    assert log.stat().st_size > 0 and "of an earlier engine" not in log.read_text()
