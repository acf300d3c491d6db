"""The program reads nothing that was left over; its tokens: `host/test_program.py`."""

import torch
from support.programs import Engine
from support.proposal_states import poison
from torch.utils._pytree import tree_map_only

# What `stage` writes or what never changes.
STAGED = {
    "num_reqs", "window", "base", "end", "start", "drafted", "requested", "limit", "slot",
    "temperature", "seeds", "draws", "row_of_slot", "draft_lengths", "request", "counts",
    "row_starts",
}  # fmt: skip


def poisoned(engine: Engine) -> None:
    """As a graph finds its buffers: whatever the last replay has left there, if there was one."""
    for name, value in vars(engine.state).items():
        if name not in STAGED:
            tree_map_only(torch.Tensor, poison, value)
    poison(engine.state.window)


def test_no_op_reads_what_neither_stage_nor_an_earlier_op_wrote():
    """Twice on poisoned buffers, as two replays of one graph, against clean ones."""
    lengths, rounds = (2, 3, 6), (1, 2)
    clean, engine = Engine(lengths, rounds, seed=6), Engine(lengths, rounds, seed=6)
    expected = clean.propose()
    for _ in range(2):
        poisoned(engine)
        assert engine.propose() == expected
        for k, count in enumerate(clean.state.drafted.tolist()):
            for b, n in enumerate(count):
                mine, theirs = engine.state.rows[k][b, :n], clean.state.rows[k][b, :n]
                if clean.state.temperature[k, b] > 0:
                    assert mine.equal(theirs)
                    torch.testing.assert_close(
                        engine.state.lse[k][b, :n], clean.state.lse[k][b, :n]
                    )
    assert engine.state.counts[:, 0].equal(2 * clean.state.counts[:, 0])


def test_a_read_of_what_nobody_wrote_is_caught(monkeypatch):
    """Negative control: without `place` a pass is fed what was there before."""
    clean, engine = Engine((2, 6), seed=6), Engine((2, 6), seed=6)
    expected = clean.propose()
    first = engine.program.levels[1].runs.forward

    def forward(state, op, num_logits):
        poison(state.input_ids)
        return first(state, op, num_logits)

    monkeypatch.setattr(engine.program.levels[1].runs, "forward", forward)
    poisoned(engine)
    assert engine.propose() != expected
