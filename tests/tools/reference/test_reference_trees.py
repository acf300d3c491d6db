"""Exact distributions of the reference engine with K drafts and trees, on table models."""

from unittest import mock

import pytest
from oracle.exact import Table, Tokens, distance
from oracle.stand_ins import TableLevel, exact_distribution
from oracle.test_cascade_exact import stopped

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.tools.reference import ReferenceEngine, TreeOptions, trees

PROMPT = [0, 1]
DRAWS = ["iid", "without_replacement", "top_k"]


def bias(
    options: TreeOptions, length: int, *, vocabulary: int = 2, eos: int | None = None
) -> float:
    """Total variation between a generation and the target's distribution."""
    target, drafter = Table(vocabulary, 1), Table(vocabulary, 101)
    engine = ReferenceEngine(
        TableLevel(target, len(PROMPT)), [TableLevel(drafter, len(PROMPT))], draft_tree=options
    )

    def generate() -> Tokens:
        return tuple(engine.generate(PROMPT, length, eos_token_id=eos).token_ids)

    return float(
        distance(exact_distribution(generate), stopped(target, length, -1 if eos is None else eos))
    )


@pytest.mark.parametrize("verifier", ["traversal", "recursive_rejection"])
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("widths", [(2,), (2, 1), (1, 2)], ids=["K tokens", "K drafts", "tree"])
def test_generation_follows_the_target(widths, draw, verifier):
    assert bias(TreeOptions(widths, draw, verifier), 3) < 1e-9


@pytest.mark.parametrize("draw", DRAWS)
def test_nothing_grows_below_eos(draw):
    assert bias(TreeOptions((2, 1), draw), 3, eos=1) < 1e-9


def test_rows_of_the_first_draw_are_caught():
    """Siblings drawn without replacement that all claim the full row."""
    draw = trees.draw_without_replacement

    def with_full_rows(row, k, generator):
        tokens, rows = draw(row, k, generator)
        return tokens, rows[:1].expand_as(rows)

    with mock.patch.object(trees, "draw_without_replacement", with_full_rows):
        assert bias(TreeOptions((2,), "without_replacement"), 2, vocabulary=4) > 1e-3


def test_one_child_everywhere_is_a_chain():
    def distribution(options, **settings):
        target, drafter = (TableLevel(Table(2, seed), len(PROMPT)) for seed in (1, 101))
        engine = ReferenceEngine(target, [drafter], options, **settings)

        def generate() -> Tokens:
            generation = engine.generate(PROMPT, 4)
            return (*generation.token_ids, generation.target_calls, generation.accepted)

        return exact_distribution(generate)

    chain, tree = distribution([LevelOptions(2)]), distribution([], draft_tree=TreeOptions((1, 1)))
    assert float(distance(chain, tree)) < 1e-9
