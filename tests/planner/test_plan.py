"""Choosing from a profile, explaining the choice, and the commands around it."""

import csv
import json

import numpy as np
import pytest
from cli.command_line import run

from vllm_hsd.config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.planner import plan
from vllm_hsd.planner.costs import Costs, TimeTable
from vllm_hsd.planner.latency import Cascade
from vllm_hsd.planner.profile import Candidate, Profile


def table(ms, slope):
    """A forward whose tokens cost more at larger batches."""
    batches, tokens = [1, 2, 8], [1, 9]
    rows = [[ms * b**0.3 + slope * b * (t - 1) for t in tokens] for b in batches]
    return TimeTable(batch_sizes=batches, tokens=tokens, ms=rows)


def plain(ms):
    return TimeTable(batch_sizes=[1, 2, 8], tokens=[1], ms=[[ms]] * 3)


@pytest.fixture
def profile():
    """Two drafters for which the cascade of both pays, and an exit that never does."""
    return Profile(
        target="models/target",
        candidates=[
            Candidate(name="mid", model="models/mid"),
            Candidate(name="small", model="models/small"),
            Candidate(name="exit 3", early_exit=3),
        ],
        max_tokens=8,
        rates=[[1, 0.8, 0.6, 0.85], [0.8, 1, 0.5, 0.68], [0.6, 0.5, 1, 0.5], [0.85, 0.68, 0.5, 1]],
        costs=Costs(
            forward=[table(1.0, 0.01), table(0.05, 0.01), table(4.0, 0.1), table(10.0, 0.05)],
            plain=plain(9.5),
        ),
    )


def everything(planner):
    """All cascades of the planner's candidates, predicted one by one."""
    names = range(len(planner.order))
    options = []
    for depth in range(1, len(names) + 1):
        subsets = {
            tuple(int(planner.order[i]) for i in levels)
            for levels, _ in plan.optimize.all_cascades(len(names), 1)
            if len(levels) == depth
        }
        for levels in subsets:
            options += [option for _, option in plan.landscape(planner, levels)]
    return options


@pytest.mark.parametrize(("size", "tokens"), [(8, None), (5, 24)])
def test_chosen_cascade_is_the_best_of_all(profile, size, tokens):
    planner = plan.Planner(profile, plan.Wanted(max_budget=size, output_tokens=tokens))
    choice = planner.choose()
    options = everything(planner)
    assert choice.best.ms == pytest.approx(min(option.ms for option in options))
    assert choice.best.cascade.levels == (1, 0)
    singles = [option.ms for option in options if len(option.cascade.levels) == 1]
    assert choice.single.ms == pytest.approx(min(singles))
    assert choice.none.ms == 9.5
    with_exit = [option.ms for option in options if 2 in option.cascade.levels]
    others = dict(choice.others)
    assert others["best with exit 3"].ms == pytest.approx(min(with_exit))
    assert [o.ms for _, o in choice.others] == sorted(o.ms for _, o in choice.others)


def test_fewer_levels_and_shorter_drafts_on_request(profile):
    wanted = plan.Wanted(max_levels=1, max_budget=3)
    best = plan.Planner(profile, wanted).choose().best
    assert len(best.cascade.levels) == 1 and best.cascade.draft_lengths[0] <= 3


def test_a_larger_batch_drafts_less(profile):
    alone = plan.Planner(profile, plan.Wanted()).choose().best
    together = plan.Planner(profile, plan.Wanted(batch=8)).choose().best
    assert sum(together.cascade.draft_lengths) < sum(alone.cascade.draft_lengths)


def test_no_speculation_can_win(profile):
    profile.costs.plain = plain(0.01)
    choice = plan.Planner(profile, plan.Wanted()).choose()
    assert choice.best is choice.none and choice.best.cascade == Cascade((), ())


def test_the_reason_names_who_takes_the_time(profile):
    choice = plan.Planner(profile, plan.Wanted()).choose()
    with_exit = dict(choice.others)["best with exit 3"]
    why = plan.why_slower(profile, with_exit, choice.best)
    assert why.startswith("target takes") and "(chosen: 5.12)" in why
    many_rounds = Cascade((1, 0), (1, 8))
    slow = plan.Option(many_rounds, plan.Planner(profile, plan.Wanted()).predict(many_rounds))
    assert plan.why_slower(profile, slow, choice.best).startswith("mid takes")
    assert "target takes 9.5 ms/token" in plan.why_slower(profile, choice.none, choice.best)
    assert "emits 1.00 tokens per call" in plan.why_slower(profile, choice.none, choice.best)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"max_budget": 9}, "covers 1 to 8 tokens"),
        ({"max_budget": 0}, "largest budget is 0"),
        ({"batch": 0}, "batch size is 0"),
        ({"batch": 4}, r"batch size 4 was not measured, only 1, 2, 8: .* --batch-sizes 4"),
        ({"max_levels": -1}, "allow at least 1 level"),
        ({"max_levels": 0}, "allow at least 1 level"),
    ],
)
def test_wishes_that_cannot_be_served(profile, wanted, message):
    with pytest.raises(UserError, match=message):
        plan.Planner(profile, plan.Wanted(**wanted)).choose()


def test_a_profile_without_costs(profile):
    profile.costs = None
    with pytest.raises(UserError, match="holds no costs"):
        plan.Planner(profile, plan.Wanted())


def test_plan_command_writes_what_the_plugin_reads(profile, tmp_path, capsys):
    profile.save(tmp_path / "profile.json")
    output = tmp_path / "cascade.json"
    assert run("plan", tmp_path / "profile.json", "-o", output) == 0
    shown = capsys.readouterr().out
    for text in ("chosen", "small", "mid", "no speculation", "best single draft", "ms/token"):
        assert text in shown
    written = json.loads(output.read_text())
    parsed = CascadeConfig.parse({"cascade": str(output)})
    choice = plan.Planner(profile, plan.Wanted()).choose()
    assert parsed.draft_lengths == list(choice.best.cascade.draft_lengths)
    assert [level.model for level in parsed.levels] == ["models/small", "models/mid"]
    assert parsed.verifier == "block"
    assert written["planned_for"]["ms_per_token"] == pytest.approx(choice.best.ms, abs=1e-3)


def test_plan_command_for_several_batch_sizes_and_exits(profile, tmp_path):
    profile.candidates = profile.candidates[2:]
    keep = np.ix_([2, 3], [2, 3])
    profile.rates = profile.rate_matrix()[keep].tolist()
    profile.costs.forward = profile.costs.forward[2:]
    profile.costs.forward[0] = table(0.5, 0.01)
    profile.save(tmp_path / "profile.json")
    output = tmp_path / "cascade.json"
    run("plan", tmp_path / "profile.json", "--batch-sizes", 1, 2, "-o", output)
    for batch in (1, 2):
        parsed = CascadeConfig.parse({"cascade": str(tmp_path / f"cascade-batch{batch}.json")})
        assert parsed.levels[0].early_exit == 3
    assert not output.exists()


def test_plan_command_says_when_nothing_pays(profile, tmp_path, capsys):
    profile.costs.plain = plain(0.01)
    profile.save(tmp_path / "profile.json")
    run("plan", tmp_path / "profile.json", "-o", tmp_path / "cascade.json")
    assert "No speculation is the fastest" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "cascade.json").exists()


def test_plots_come_with_their_numbers(profile, tmp_path):
    pytest.importorskip("matplotlib")
    profile.save(tmp_path / "profile.json")
    plots = tmp_path / "plots"
    output = tmp_path / "cascade.json"
    run("plan", tmp_path / "profile.json", "--max-draft-tokens", 4, "--plot", plots, "-o", output)
    assert {path.name for path in plots.iterdir()} == {
        "latency-batch1.png", "latency-batch1.csv", "rates.png", "rates.csv"
    }  # fmt: skip
    rows = list(csv.DictReader((plots / "latency-batch1.csv").open()))
    chosen = json.loads(output.read_text())["planned_for"]["ms_per_token"]
    assert min(float(row["ms_per_token"]) for row in rows) == pytest.approx(chosen, abs=1e-3)
