"""`vllm-hsd bench`: arguments, order of runs, figures and files; a short run with engines."""

import csv
import dataclasses
import html
import json
import re
from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
from support.bench_check import SETUP, check_bench, make_comparison
from support.command_line import run
from support.engines import forked, started

from vllm_hsd.errors import UserError
from vllm_hsd.tools import system
from vllm_hsd.tools.cli import bench, bench_files, bench_report, bench_runs, greedy
from vllm_hsd.tools.cli import main as cli
from vllm_hsd.tools.cli.bench_jobs import Job, Results, Setup
from vllm_hsd.tools.cli.bench_runs import jobs, measure
from vllm_hsd.tools.cli.options import rendered
from vllm_hsd.tools.engine import EngineProcess, Generation
from vllm_hsd.tools.worker_process import WorkerProcess

KEYS = [
    "config", "name", "batch_size", "temperature", "rounds", "tokens_per_second", "speedup",
    "speedup_low", "speedup_high", "tokens_per_step", "acceptance", "ttft_ms", "tpot_ms",
    "greedy_differences", "greedy_gap", "redundancy", "target_utilization", "swi",
    "accepted_per_step", "sources",
]  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
CASCADE = {
    "method": "hsd",
    "num_speculative_tokens": 8,
    "levels": [{"ngram": {"max": 4}, "num_tokens": 3}, {"model": "org/small"}],
}


def three_rounds(tmp_path, configs=(None, NGRAM, CASCADE), **changes):
    sizes = {"batch_sizes": [1, 2], "temperatures": [0.0, 1.0], "rounds": 3, **changes}
    return make_comparison(tmp_path, configs, "ab", **sizes)


def test_dashes_are_read_in_what_this_package_serves(tmp_path):
    """`verify` compares by them; vLLM refuses dashes in methods of its own."""
    ours = {"method": "draft_model", "rejection-sample-method": "hierarchical"}
    configs = [json.dumps(config) for config in (ours, {"method": "ngram", "prompt-lookup-max": 3})]
    arguments = SimpleNamespace(
        engine_args="{}", prompts=None, model="x", dtype="auto", output=tmp_path
    )
    sizes = {"batch_sizes": [1], "temperatures": [0.0], "max_tokens": 1, "num_prompts": 1}
    read = bench.comparison_of(arguments, configs, rounds=1, **sizes).configs
    assert read[1:] == [
        {key.replace("-", "_"): value for key, value in ours.items()},
        json.loads(configs[1]),
    ]


def test_of_what_an_output_directory_holds_only_our_own_is_removed(tmp_path):
    theirs, ours = tmp_path / "logs" / "server.log", tmp_path / "engine-logs" / "0.log"
    for path in (theirs, ours):
        path.parent.mkdir()
        path.touch()
    bench.prepare_output(tmp_path)
    assert theirs.exists() and not ours.exists()


class FakeEngines(AbstractContextManager):
    """Engines that take SECONDS per prompt and round, can break in a round, or answer wrongly."""

    SECONDS: ClassVar = ((4.0, 4.0, 8.0), (4.0, 2.0, 2.0), (1.0, 1.0, 1.0))
    STEP_LENGTHS: ClassVar = ([1, 1, 1, 1, 1], [1, 2, 2], [1, 4])
    LEVELS: ClassVar = [
        {"drafted": 6, "accepted": 3, "seconds": 0.1},
        {"drafted": 4, "accepted": 3, "seconds": 0.2},
    ]
    SOURCES: ClassVar = {"forced": {"drafted": 3.0, "accepted": 2.0}}
    DRAFTS: ClassVar = (
        {"drafted": 0, "accepted": 0},
        {"drafted": 8, "accepted": 2},
        {"drafted": 8, "accepted": 3, "levels": LEVELS, "sources": SOURCES},
    )
    broken_in_round: ClassVar[dict[int, int]] = {}
    wrong: ClassVar[set[int]] = set()
    gap: ClassVar[float] = 0.0
    closed: ClassVar[list[int | None]] = []
    stay_loaded, cores = True, (1,)

    def __init__(self, comparison, setup):
        parts = sum(len(comparison.prompt_batches(size)) for size in comparison.batch_sizes)
        self.jobs_per_round = parts * len(comparison.temperatures)
        self.answered: Counter[int] = Counter()

    def get(self, index):
        methods = {"call": self.call, "generate": self.generate}
        return SimpleNamespace(**{key: partial(each, index) for key, each in methods.items()})

    def close(self, index=None):
        self.closed.append(index)

    def __exit__(self, *exception):
        self.close()

    def call(self, index, function, places=()):
        assert function is greedy.gaps_of_target and index == 0
        return [self.gap] * len(places)

    def generate(self, index, prompts, sampling_params):
        round_ = self.answered[index] // self.jobs_per_round
        self.answered[index] += 1
        if self.broken_in_round.get(index) == round_:
            raise UserError("'x' ended early with signal SIGKILL.")
        count, lengths = len(prompts), self.STEP_LENGTHS[index]
        seconds = self.SECONDS[index][round_] * count
        tokens = [[7, 7, 7, 7, 7] for _ in prompts]
        if index in self.wrong:
            tokens[-1] = [7, 7, 7, 7, 8]
        return Generation(
            tokens, ["text"] * count, seconds, seconds, [0.5] * count, [2.5] * count,
            [len(lengths)] * count, step_lengths=[lengths] * count, **self.DRAFTS[index],
        )  # fmt: skip


@pytest.fixture
def fakes(monkeypatch):
    monkeypatch.setattr(bench_runs, "Engines", FakeEngines)
    monkeypatch.setattr(FakeEngines, "closed", [])


def measured(comparison, dtype="float32"):
    setup = dataclasses.replace(SETUP, dtype=dtype)
    results = Results(comparison, metadata=bench.describe(comparison, setup))
    measure(results, setup)
    return results, bench_report.rows(results)


def test_configurations_alternate_in_an_order_that_rotates(tmp_path):
    comparison = three_rounds(tmp_path, batch_sizes=[1], temperatures=[0.0])
    assert [(job.part, job.config) for job in jobs(comparison, 0, True)] == [
        (0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (1, 0),
    ]  # fmt: skip
    assert [job.config for job in jobs(comparison, 1, True)][:3] == [1, 2, 0]
    # Engines that cannot stay loaded change once a round.
    assert [job.config for job in jobs(comparison, 1, False)] == [1, 1, 2, 2, 0, 0]


def test_a_control_is_no_speculation_once_more(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(bench, "run", lambda comparison: found.append(comparison) or 0)
    given = ["--speculative-config", json.dumps(NGRAM), "--control", "--output", str(tmp_path)]
    assert cli.main(["bench", "--model", "org/target", *given]) == 0
    assert found[0].configs == [None, NGRAM, None]
    assert found[0].names[0] == "no speculation" and found[0].names[2] == "no speculation (2)"


def test_rows_hold_the_figures(fakes, tmp_path, capsys):
    _, rows = measured(three_rounds(tmp_path))
    assert [list(row) for row in rows] == [KEYS] * 12
    none, ngram, cascade = rows[:3]
    assert (none["config"], ngram["config"]) == (None, NGRAM)
    assert [row["tokens_per_second"] for row in rows[:3]] == [1.25, 2.5, 5.0]
    assert [row["speedup"] for row in rows[:3]] == [1.0, 2.0, 4.0]
    assert (ngram["speedup_low"], ngram["speedup_high"]) == (1.0, 4.0)
    # Five tokens: one from prefill, four from the other steps.
    assert [row["tokens_per_step"] for row in rows[:3]] == [1.0, 2.0, 4.0]
    assert none["acceptance"] == [] and ngram["acceptance"] == [0.25]
    assert cascade["acceptance"] == [0.5, 0.75]
    # Of 10 tokens level 1 passed 3 on as its own, and the target kept 3.
    assert [row["redundancy"] for row in rows[:3]] == [None, 0.75, round(1 - 3 / 7, 4)]
    assert [row["target_utilization"] for row in rows[:3]] == [None, 0.6, 0.4]
    assert ngram["accepted_per_step"] == [0, 12] and cascade["accepted_per_step"] == [0, 0, 0, 6]
    # Of three rounds with two batches of one prompt.
    forced = {"forced": {"drafted": 18, "accepted": 12}}
    assert [row["sources"] for row in rows[:3]] == [None, None, forced]
    # Four tokens in a step of 0.5 s and 0.3 s of drafting, without speculation in 2 s.
    assert [row["swi"] for row in rows[:3]] == [None, None, 2.5]
    assert (none["ttft_ms"], none["tpot_ms"]) == (500.0, 500.0)
    assert [row["greedy_differences"] for row in rows[:6]] == [0, 0, 0, None, None, None]
    # A line for every run, also when the output is not a terminal.
    assert capsys.readouterr().err.count("tokens/s") == 3 * 3 * 2 * (2 + 1)


@pytest.mark.parametrize(
    ("dtype", "gap", "explained", "said"),
    [
        ("float32", None, False, "in float32 they must be equal"),
        ("bfloat16", 0.03, True, "gap 0.030 nats"),
        ("bfloat16", 0.5, True, "gap 0.500 nats"),
        ("bfloat16", 0.51, False, "gap 0.510 nats"),
    ],
)
def test_a_greedy_difference_is_a_failure_but_for_near_ties_in_bfloat16(
    fakes, tmp_path, monkeypatch, dtype, gap, explained, said
):
    monkeypatch.setattr(FakeEngines, "wrong", {2})
    monkeypatch.setattr(FakeEngines, "gap", gap)
    results, rows = measured(three_rounds(tmp_path, batch_sizes=[2]), dtype)
    first = results.differences[0]
    assert (first.context, first.expected, first.found) == ((3, 7, 7, 7, 7), 7, 8)
    assert len(greedy.unexplained(results.differences, dtype)) == (0 if explained else 3)
    assert (rows[1]["greedy_gap"], rows[2]["greedy_gap"]) == (None, gap)
    table = rendered(bench_report.report(results, rows)).export_text().replace("up to ", "")
    assert "ngram 3, small 8: 3 of 6 greedy outputs differ" in table
    assert ("nearly tie" in table) is explained and said in table


def test_what_could_not_run_has_no_numbers(fakes, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEngines, "broken_in_round", {1: 2})
    results, rows = measured(three_rounds(tmp_path))
    broken = [row for row in rows if row["name"] == "ngram 4"]
    assert len(broken) == 4
    for row in broken:
        assert row["error"] == "'x' ended early with signal SIGKILL."
        assert all(row[key] is None for key in KEYS[5:])
    assert FakeEngines.closed == [1, None]
    table = rendered(bench_report.report(results, rows)).export_text()
    assert table.count("ngram 4") == table.count("could not run: 'x' ended early") == 4
    bench_files.write(results, rows)
    assert json.loads((tmp_path / "bench.json").read_text())["rows"][1] == rows[1]


def test_table_and_files(fakes, tmp_path):
    comparison = three_rounds(tmp_path)
    results, rows = measured(comparison)
    table = rendered(bench_report.report(results, rows)).export_text()
    assert max(map(len, table.splitlines())) <= 98
    assert "Batch size 2, temperature 1" in table
    line = next(line for line in table.splitlines() if line.startswith("ngram 3, small 8"))
    figures = line.removeprefix("ngram 3, small 8").split()
    assert figures == ["5.0", "4.00", "(4.00-8.00)", "4.00", "0.50", "0.75", "500.0", "0"]
    written = bench_files.write(results, rows)
    paths = (str(tmp_path / f"bench.{kind}") for kind in ("json", "csv", "html"))
    assert written == f"Written: {', '.join(paths)}"
    page = (tmp_path / "bench.html").read_text()
    assert line in page and "http" not in page
    assert json.dumps(CASCADE) in " ".join(html.unescape(page).split())
    # At every batch size and temperature a row is four times as fast, and one half of that.
    lengths = Counter(map(len, re.findall("█+", page)))
    assert lengths == {bench_files.BAR: 4, bench_files.BAR // 2: 4, bench_files.BAR // 4: 4}
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["rows"] == rows
    assert document["dtype"] == "float32" and "1 thread" in document["machine"]
    with (tmp_path / "bench.csv").open() as file:
        table_rows = list(csv.DictReader(file))
    assert list(table_rows[0]) == [*KEYS, "error"]
    assert json.loads(table_rows[2]["config"]) == CASCADE
    assert table_rows[2]["acceptance"] == "0.5000 0.7500"
    assert table_rows[2]["accepted_per_step"] == "0 0 0 6"
    assert table_rows[2]["sources"] == "forced 12/18" and table_rows[1]["sources"] == ""
    by_source = [line.split()[-3:] for line in table.splitlines() if " forced " in line]
    assert by_source == [["forced", "18", "12"]] * 2 + [["forced", "9", "6"]] * 2
    drafting = [line.split() for line in table.splitlines() if "3:100%" in line]
    assert [line[-4:] for line in drafting[:2]] == [["0.57", "0.40", "2.50", "3:100%"]] * 2


def test_what_a_prompt_asks_for_reaches_the_engines_that_know_it(tmp_path):
    own = {"hsd_prediction": "x", "hsd_num_tokens": 2, "mine": 1}
    sampling = [{"extra_args": own}, {"structured_outputs": {"json": {}}}]
    comparison = three_rounds(tmp_path, sampling=sampling, num_prompts=3)
    known = [set(), {"hsd_num_tokens"}, set(own) - {"mine"}]
    setup = dataclasses.replace(SETUP, request_keys=known)
    of_all = {"max_tokens": 5, "ignore_eos": False, "temperature": 0.5}
    for config, keys in enumerate(known):
        job = Job(config, 0, 3, 0.5, 0, (0, 1, 2))
        params = bench_runs.sampling_params(comparison, setup, job)
        assert params[0] == params[2] and params[0]["ignore_eos"]
        assert params[0]["extra_args"] == {name: own[name] for name in keys | {"mine"}}
        assert params[1] == of_all | sampling[1]
    assert "hsd_prediction" in own


def test_gaps_below_a_grammar_are_those_of_two_tokens(fakes, tmp_path, monkeypatch):
    asked = []

    def call(self, index, function, places=(), **options):
        asked.append(options)
        return [0.1] * len(places)

    monkeypatch.setattr(FakeEngines, "call", call)
    monkeypatch.setattr(FakeEngines, "wrong", {2})
    sampling = [{}, {"structured_outputs": {"json": {}}}]
    comparison = three_rounds(tmp_path, sampling=sampling, batch_sizes=[1])
    results, _ = measured(comparison, "bfloat16")
    assert asked == [{}, {"alone": True}]
    assert [each.gap for each in results.differences] == [0.1] * 6


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--speculative-config", "{", "--speculative-config number 2 is not JSON"),
        ("--speculative-config", "[1]", "--speculative-config number 2 is not a JSON object"),
        ("--engine-args", "nope", "--engine-args is not JSON"),
        ("--engine-args", '{"speculative_config": {}}', "use --speculative-config"),
        ("--engine-args", '{"model": "y"}', "must not hold model: use --model"),
        ("--engine-args", '{"dtype": "auto"}', "use --dtype"),
        ("--engine-args", '{"max_num_seqs": 0}', "has max_num_seqs 0, but --batch-sizes 1"),
        ("--batch-sizes", "0,4", "--batch-sizes must be at least 1"),
        ("--temperatures", "-1", "--temperatures must be at least 0"),
        ("--temperatures", "nan", "--temperatures must be at least 0"),
        ("--temperatures", "0.005", "--temperatures must be 0 or at least 0.01"),
        ("--rounds", "0", "--rounds must be at least 1"),
        ("--max-tokens", "0", "--max-tokens must be at least 1"),
        ("--prompts", "nowhere.jsonl", "nowhere.jsonl"),
        ("--model", "./nowhere", "--model './nowhere' is not a directory"),
    ],
)
def test_wrong_arguments_get_one_sentence_and_status_2(option, value, message, capsys, tmp_path):
    command = ["bench", "--model", "x", "--output", str(tmp_path), "--speculative-config"]
    assert cli.main([*command, json.dumps(NGRAM), f"{option}={value}"]) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_a_share_of_the_host_s_memory_is_for_one_engine_alone(tmp_path):
    comparison = three_rounds(tmp_path, engine_args={"gpu_memory_utilization": 0.5})
    setup = Setup([], [[1]], device="cpu", max_model_len=64)
    assert "kv_cache_memory_bytes" not in bench_runs.engine_arguments(comparison, setup, 1)
    with pytest.raises(UserError, match="give kv_cache_memory_bytes"):
        bench_runs.engine_arguments(comparison, setup, 2)


@pytest.fixture
def forks(monkeypatch) -> None:
    """The command's processes, which a user's machine spawns, have vLLM imported."""
    for module, cls in ((bench, WorkerProcess), (bench_runs, EngineProcess)):
        monkeypatch.setattr(module, cls.__name__, partial(cls, **forked()))


def test_a_bad_configuration_ends_bench_before_it_measures(forks, text_family, tmp_path, capsys):
    command = ["bench", "--model", text_family.target, "--output", str(tmp_path / "out")]
    for config in (NGRAM, {**CASCADE, "levelz": 1}):
        command += ["--speculative-config", json.dumps(config)]
    status = cli.main(command)
    captured = capsys.readouterr()
    assert status == 2 and "--speculative-config number 2: " in captured.err
    assert "levelz" in captured.err and "loading" not in captured.err and not captured.out


def test_a_cascade_is_compared_with_no_speculation(forks, text_family, tmp_path, capsys):
    """The whole command; `test_wheel` spawns its engines (slow)."""

    def vllm_hsd(*arguments):
        assert cli.main(list(arguments)) == 0
        return capsys.readouterr().out

    check_bench(vllm_hsd, text_family, tmp_path)


@pytest.mark.slow
def test_prompts_with_a_prediction_and_a_grammar(forks, text_family, tmp_path, capsys):
    schema = {"enum": ["one of them, at length", "only this one, otherwise"]}
    # Whatever the answer begins with, a place follows it.
    predicted = {"hsd_prediction": "".join(map(chr, range(32, 127)))}
    lines = [
        {"prompt": "def f(", "extra_args": predicted},
        {"prompt": "import ", "structured_outputs": {"json": schema}},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, lines)))
    hsd = {"method": "hsd", "num_speculative_tokens": 6, "adaptive": False}
    lowest = ({"sources": [{"prediction": {}}, {"suffix": {}}]}, {"prediction": {}}, {"suffix": {}})
    configs = []
    for level in lowest:
        configs += ["--speculative-config", json.dumps({**hsd, "levels": [level]})]
    status = run(
        "bench", "--model", text_family.target, "--prompts", prompts, "--max-tokens", 40,
        "--num-prompts", 2, "--rounds", 1, "--temperatures", 0, "--dtype", "float32",
        "--engine-args", json.dumps({"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}),
        "--output", tmp_path, *configs,
    )  # fmt: skip
    assert status == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["greedy_differences"] for row in rows] == [0] * 4
    sources = [list(row["sources"] or ()) for row in rows]
    assert sources == [[], ["prediction", "suffix", "forced"], ["forced", "prediction"], ["forced"]]
    for row in rows[1:]:
        assert row["sources"]["forced"]["accepted"] > 10 and " forced " in printed
    assert all(row["sources"]["prediction"]["drafted"] > 0 for row in rows[1:3])


def test_gaps_come_from_the_target_itself(text_family):
    """The likeliest token has none, and an unlikely one is no near tie."""
    # On virtual machines that claim AMX bfloat16 models may end in an illegal instruction.
    claims_amx = {"amx_bf16", "hypervisor"} <= system.flags()
    dtype = "float32" if claims_amx else "bfloat16"
    context = (20, 21, 22)
    with started({"model": text_family.target, "dtype": dtype}) as engine:
        params = {"temperature": 0.0, "max_tokens": 1, "logprobs": 5}
        best = engine.generate([context], params).token_ids[0][0]
        wrong = (best + 1) % text_family.vocabulary
        none, some = engine.call(
            greedy.gaps_of_target, [(context, best, best), (context, best, wrong)]
        )
        (alone,) = engine.call(greedy.gaps_of_target, [(context, best, wrong)], alone=True)
        (neither,) = engine.call(greedy.gaps_of_target, [(context, wrong, wrong)], alone=True)
    assert none == neither == 0 and alone == some > greedy.LARGEST_GAP["bfloat16"]


def test_branches_have_their_rows_of_attention(tmp_path):
    drawn = {"method": "hsd", "levels": [{"model": "small", "branches": 3}]}
    looked_up = {"method": "hsd", "levels": [{"sources": [{"ngram": {}}]}]}
    for config, rows in ((drawn, 3), (looked_up, 1), ({"method": "ngram"}, 1)):
        found = three_rounds(tmp_path, configs=[None, config])
        assert found.base_args["max_num_seqs"] == max(2, rows)
        found = dataclasses.replace(found, batch_sizes=[2])
        assert found.base_args["max_num_seqs"] == 2 * rows
