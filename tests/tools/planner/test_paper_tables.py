"""Scripts that set ours next to tables and closed forms of papers."""

from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from oracle.exact import distance, distribution_of, extended
from oracle.sequential import standard

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
def test_latencies_are_those_of_the_paper_and_of_its_simulated_algorithm(table, monkeypatch):
    monkeypatch.setattr(tables, "SIMULATED_CALLS", 40_000)
    rows = tables.example_rows(table)
    # From the third model on, the paper estimates gamma.
    for row in rows[:2]:
        assert round(row["our_latency"], 2) == row["paper_latency"]
    for row in rows:
        assert row["simulated"] == pytest.approx(row["our_latency"], rel=0.015)
        assert row["simulated_all_up"] <= row["simulated"] * 1.01


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


def test_interleaved_rule_as_printed_is_biased_and_its_correction_is_not():
    """Printed, the first rejected token stays, and the next is drawn from p."""
    drawn = np.random.default_rng(3).dirichlet(np.full(3, 0.5), size=3)
    p, medium, small = ([Fraction(x) for x in row] for row in drawn)
    rows = [small, medium, small, medium]  # m = 2, n = 1

    def call(choices, printed=False):
        draft = tuple(choices.sample(q) for q in rows)
        kept, token = standard([p] * 5, rows, draft, choices.bernoulli, choices.sample)
        return draft[: kept + 1] if printed else (*draft[:kept], token)

    def bias(emitted):
        texts, truth = (extended(each, lambda text: p, 5) for each in (emitted, {(): Fraction(1)}))
        return distance(texts, truth)

    fixed = distribution_of(call)
    assert bias(fixed) < 1e-12
    assert bias(distribution_of(partial(call, printed=True))) > 0.2
    alpha, beta = (float(sum(map(min, p, q))) for q in (medium, small))
    tokens = float(sum(len(text) * chance for text, chance in fixed.items()))
    assert tokens == pytest.approx(interleaved_tokens(alpha, beta, 2, 1))


def test_our_interleaved_cascade_emits_what_the_closed_form_says():
    tokens, error = measured_tokens(0.8, 0.7, 2, 1)
    assert abs(tokens - interleaved_tokens(0.8, 0.7, 2, 1)) < 4 * error < 0.5
