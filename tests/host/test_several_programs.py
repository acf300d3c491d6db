"""Programs that draw several drafts of each request: rows, caches, graphs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.programs import PROMPT, Engine
from support.proposal_states import TableLevel
from support.recorded_graph import RecordedGraph, capture

from vllm_hsd.cascade.level import Level
from vllm_hsd.kernels import naive as reference


def rows_of(engine: Engine) -> list[list[list[int]]]:
    """The rows of all requests after a proposal, the chain first."""
    several, found = engine.several, []
    for b, chain in enumerate(engine.drafts()):
        counts = several.branch_counts[b].tolist()
        rows = zip(several.branches[b], counts, strict=True)
        found.append([chain, *(row[:count].tolist() for row, count in rows)])
    return found


def expected(engine: Engine, b: int, row: int, given: list[int]) -> tuple[list[int], torch.Tensor]:
    """A request's row, as drawn from the table after its text, and the logits of its tokens."""
    slot = int(engine.index[b])
    text = engine.text[slot, PROMPT : engine.length[slot]].tolist()
    temperature = (engine.temperature[slot] * engine.scales[0])[None]
    first = engine.state.draws[b] + row * engine.schedule.draft_lengths[0]
    tokens, logits = [], []
    for t in range(len(given)):
        said = torch.tensor(engine.levels[0].rows.row((*text, *tokens)))[None].float()
        if row and t == 0 and temperature <= 0:
            # Of tokens that are as likely as each other it may begin with either.
            ranked = said[0].sort(descending=True).values
            tokens.append(given[0] if said[0, given[0]] == ranked[row] else -1)
        else:
            drawn, _ = reference.sample_row(
                said, temperature, engine.seeds[slot, None], first[None] + t
            )
            tokens.append(int(drawn))
        logits.append(said[0])
    return tokens, torch.stack(logits) if logits else torch.zeros(0, 5)


def keep_any(engine: Engine, rows: list, random: np.random.Generator) -> int:
    """The step of a target that keeps a part of any row and adds any token; how many others won."""
    won = 0
    for b, own in enumerate(rows):
        winner = own[int(random.integers(0, len(own)))]
        kept = int(random.integers(0, len(winner) + 1))
        won += kept > 0 and winner[:kept] != own[0][:kept]
        engine.commit(b, [*winner[:kept], int(random.integers(0, 5))])
    return won


def check_rows(engine: Engine, steps: int = 9) -> int:
    """Every row is the model's, with the logits that it was drawn from; how often another won."""
    random, won = np.random.default_rng(1), 0
    for _ in range(steps):
        engine.propose()
        rows = rows_of(engine)
        for b, own in enumerate(rows):
            for row, tokens in enumerate(own):
                wanted, logits = expected(engine, b, row, tokens)
                assert tokens == wanted and len(tokens) == len(own[0]), (b, row)
                kept = engine.state.rows[0] if row == 0 else engine.several.rows[row - 1]
                if engine.temperature[engine.index[b]] > 0:
                    assert kept[b, : len(tokens)].equal(logits)
            if own[0] and engine.temperature[engine.index[b]] == 0:
                assert len({row[0] for row in own}) == len(own)
        won += keep_any(engine, rows, random)
    return won


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize(("drafts", "length"), [(2, 3), (4, 2), (3, 1)])
def test_rows_are_the_models_after_any_row_won(drafts, length, greedy):
    """Up to max_model_len; of the cache nothing is left that belongs to another row."""
    assert check_rows(Engine((length,), drafts=drafts, greedy=greedy), steps=16) > 8


def test_a_shorter_first_pass_leaves_tokens_of_the_chain():
    """Negative control of the catch-up rule."""
    engine = Engine((3,), drafts=2)
    first, *later = engine.schedule.ops
    ops = (replace(first, query_length=first.query_length - 1), *later)
    engine.program.schedule = replace(engine.schedule, ops=ops)
    with pytest.raises(AssertionError):
        check_rows(engine)


def test_proposals_of_several_drafts_and_of_one_follow_each_other():
    engine, random = Engine((3,), drafts=3), np.random.default_rng(2)
    several = engine.program.schedule
    for step in range(8):
        engine.program.schedule = several.with_one_draft() if step % 2 else several
        engine.propose()
        rows = rows_of(engine)
        for b, own in enumerate(rows):
            assert [len(row) for row in own[1:]] == [0 if step % 2 else len(own[0])] * 2
            assert own[0] == expected(engine, b, 0, own[0])[0]
        rows = [[row for row in own if row] or [[]] for own in rows]
        keep_any(engine, rows, random)


def test_a_graph_drafts_what_the_program_drafts():
    """Recorded on padding alone; nothing is read on the host."""
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    plain, graphed = (Engine((3,), drafts=3, seed=5) for _ in range(2))
    for engine in (plain, graphed):
        engine.program.levels = [Level(TableLevel(table))]
    graph, run, index = RecordedGraph(), graphed.program.run, graphed.index
    graphed.index, graphed.program.run = index[:0], lambda state: None
    graphed.propose()
    with capture(graph):
        run(graphed.state)
    graphed.index, graphed.program.run = index, lambda state: graph.replay()
    for step in range(6):
        plain.propose()
        graphed.propose()
        rows = rows_of(plain)
        assert rows_of(graphed) == rows and rows[0][1]
        for engine in (plain, graphed):
            keep_any(engine, rows, np.random.default_rng(step))
