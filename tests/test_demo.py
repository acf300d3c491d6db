"""The demo on the real model: prompts, rounds, table; without engines."""

import time

import pytest

from benchmarks.end_to_end import demo
from vllm_hsd.cli.bench_jobs import Comparison, Results
from vllm_hsd.engine import Generation

KINDS = ["a", "b"]


class FakeEngines:
    """Engines that take twice as long without speculation."""

    def get(self, index):
        self.index = index
        return self

    def generate(self, prompts, params, on_text):
        assert len(prompts) == 1 and params["max_tokens"] == 4
        on_text(0, "te")
        on_text(0, "xt")
        seconds = 1.0 if self.index else 2.0
        return Generation([[1, 2, 3, 4]], ["text"], seconds, seconds, [0.1], [1.0], [2])


@pytest.fixture
def results(tmp_path):
    comparison = Comparison(
        model="m",
        configs=[None, {"method": "ngram", "num_speculative_tokens": 2}],
        prompts=list("uvwxyz"),
        batch_sizes=[1],
        temperatures=demo.TEMPERATURES,
        max_tokens=4,
        num_prompts=6,
        rounds=3,
        engine_args={},
        output=tmp_path,
    )
    return Results(comparison, metadata={"dtype": "float32", "on_host": True})


def test_prompts_are_six_of_each_of_six_kinds():
    prompts = demo.read_demo_prompts()
    assert [len(set(texts)) for texts in prompts.values()] == [6] * 6


def test_every_prompt_is_answered_by_every_configuration(results, tmp_path, capsys):
    demo.measure(results, [[n] for n in range(6)], KINDS, FakeEngines(), time.monotonic() + 1000)
    asked = {(job.config, job.temperature, job.prompts) for job in results.generations}
    assert len(asked) == len(results.generations) == 2 * 2 * 6
    # A line for every answer where there is no terminal.
    assert capsys.readouterr().out.count("text ...") == 24
    rows = demo.table_rows(results, KINDS)
    assert len(rows) == 2 * 3 * 2 and rows[0]["rounds"] == 3
    assert [row["speedup"] for row in rows] == ["1.000", "2.000"] * 6
    demo.print_tables(rows, results.comparison.names)
    assert "2.00 (2.00-2.00)" in capsys.readouterr().out
    demo.plot(rows, results.comparison.names, "title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_one_round_is_whole_when_the_time_is_over(results):
    demo.measure(results, [[n] for n in range(6)], KINDS, FakeEngines(), time.monotonic())
    assert results.comparison.rounds == 1 and len(results.generations) == 2 * 2 * 2
