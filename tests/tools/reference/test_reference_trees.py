"""Exact distributions of the reference engine with K drafts and trees, on table models."""

from unittest import mock

import pytest
from oracle.exact import Table, Tokens, distance
from oracle.stand_ins import TableLevel, exact_distribution
from oracle.test_cascade_exact import PROMPT, bias

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.tools.reference import ReferenceEngine, TreeOptions, trees

DRAWS = ["iid", "without_replacement", "top_k"]


def model(vocabulary: int, seed: int) -> TableLevel:
    return TableLevel(Table(vocabulary, seed), len(PROMPT))


@pytest.mark.parametrize("verifier", ["traversal", "recursive_rejection"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("widths", [(2,), (2, 1), (1, 2)], ids=["K tokens", "K drafts", "tree"])
def test_generation_follows_the_target(widths, draw, verifier):
    assert bias([model(2, 101)], [], 3, draft_tree=TreeOptions(widths, draw, verifier)) < 1e-9


@pytest.mark.parametrize("draw", DRAWS)
def test_nothing_grows_below_eos(draw):
    assert bias([model(2, 101)], [], 3, eos=1, draft_tree=TreeOptions((2, 1), draw)) < 1e-9


def test_rows_of_the_first_draw_are_caught():
    """Siblings drawn without replacement that all claim the full row."""
    draw = trees.draw_without_replacement

    def with_full_rows(row, uniforms):
        tokens, rows = draw(row, uniforms)
        return tokens, rows[:1].expand_as(rows)

    tree = TreeOptions((2,), "without_replacement")
    with mock.patch.object(trees, "draw_without_replacement", with_full_rows):
        assert bias([model(4, 101)], [], 2, vocabulary=4, draft_tree=tree) > 1e-3


def test_one_child_everywhere_is_a_chain():
    def distribution(options, **settings):
        engine = ReferenceEngine(model(2, 1), [model(2, 101)], options, **settings)

        def generate() -> Tokens:
            generation = engine.generate(PROMPT, 4)
            return (*generation.token_ids, generation.target_calls, generation.accepted)

        return exact_distribution(generate)

    chain, tree = distribution([LevelOptions(2)]), distribution([], draft_tree=TreeOptions((1, 1)))
    assert float(distance(chain, tree)) < 1e-9
