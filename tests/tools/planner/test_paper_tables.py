"""The scripts that set our optima next to Tables 1, 8 and 9, and that enumerate verifiers."""

import csv
import sys

import numpy as np
import pytest

from benchmarks.paper_tables import gsp_tables as tables
from benchmarks.paper_tables import verifiers
from benchmarks.paper_tables.closed_forms import interleaved_tokens
from benchmarks.paper_tables.interleaved import measured_tokens


def test_every_cell_of_table_9():
    rows = tables.table_9_rows()
    assert len(rows) == 80
    assert max(abs(row["paper_speedup"] - row["our_speedup"]) for row in rows) < 0.01
    kinds = {row["hierarchy"] for row in rows}
    assert kinds == {"A-B", "A-C", "A-B-C"}


@pytest.mark.parametrize("table", [1, 8])
def test_simulated_algorithm_confirms_our_latency(table, monkeypatch):
    monkeypatch.setattr(tables, "SIMULATED_CALLS", 40_000)
    for row in tables.example_rows(table):
        assert row["simulated"] == pytest.approx(row["our_latency"], rel=0.015)
        assert row["simulated_all_up"] <= row["simulated"] * 1.01


def test_script_writes_its_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gsp_tables.py", "-o", str(tmp_path)])
    monkeypatch.setattr(tables, "SIMULATED_CALLS", 1000)
    tables.main()
    for name, rows in (("table_1.csv", 6), ("table_8.csv", 6), ("table_9.csv", 80)):
        assert len(list(csv.DictReader((tmp_path / name).open()))) == rows
    assert "largest difference" in capsys.readouterr().out


def test_which_verification_rules_keep_the_distribution():
    rng = np.random.default_rng(1)
    for _ in range(5):
        pair = p, q = verifiers.random_rows(3, 3, 1.0, rng)
        found = {rule: verifiers.outcome(*pair, rule) for rule in verifiers.RULES}
        tokens, bias = ({rule: values[i] for rule, values in found.items()} for i in (0, 1))
        assert bias["token-level"] < 1e-12 and bias["block"] < 1e-12
        assert bias["exclusive cap"] > 1e-4 and bias["uncapped last ratio"] > 1e-4
        assert tokens["token-level"] < tokens["block"] < tokens["uncapped last ratio"]
        assert tokens["exclusive cap"] == pytest.approx(tokens["block"])
        # Leviathan et al., Corollary 3.6.
        overlap = np.minimum(p[0], q[0]).sum()
        assert verifiers.outcome(p[:2], q[:1], "block")[0] == pytest.approx(1 + overlap)


def test_our_interleaved_cascade_emits_what_the_closed_form_says():
    tokens, error = measured_tokens(0.8, 0.7, 2, 1)
    assert abs(tokens - interleaved_tokens(0.8, 0.7, 2, 1)) < 4 * error < 0.5
