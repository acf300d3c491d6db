"""Programs against the reference cascade, on equal uniforms: kernels compiled for a CPU."""

import numpy as np
import pytest
import torch
from support.programs import Engine

from vllm_hsd.cascade import program

STANDARD_ON_TOP, ENDS = ("block", "block", "standard"), {"seed": 2, "vocabulary": 7}
PLAIN = [
    {"lengths": (4,), "seed": 1},
    {"lengths": (2, 6), "seed": 2},
    {"lengths": (3, 8), "rounds": (4,), "seed": 2},
    {"lengths": (1, 3, 7), "rounds": (2, 3), "verifiers": STANDARD_ON_TOP, "seed": 3},
    {"lengths": (2, 3, 6), "rounds": (1, 2), "verifiers": STANDARD_ON_TOP, "seed": 3},
    {"lengths": (2, 6), "verifiers": ("block", "none"), "seed": 2},
    {"lengths": (1, 3, 7), "rounds": (2, 3), "verifiers": ("block", "none", "block"), "seed": 3},
    {"lengths": (2, 3, 6), "rounds": (1, 2), "verifiers": ("block", "block", "none"), "seed": 3},
    {"lengths": (2, 6), "verifiers": ("block", "standard"), "seed": 5},
]
BY_ENTROPY = [
    {"lengths": (5,), "stopping": ("entropy",)},
    {"lengths": (3, 8), "rounds": (4,), "stopping": ("entropy",) * 2},
    {"lengths": (2, 3, 7), "rounds": (2, 3), "stopping": ("entropy", "fixed", "entropy")},
    {"lengths": (2, 6), "verifiers": ("block", "none"), "stopping": ("entropy",) * 2},
    {
        "lengths": (2, 4, 7),
        "rounds": (2, 2),
        "verifiers": ("block", "none", "block"),
        "stopping": ("entropy", "fixed", "entropy"),
    },
]
HORIZONTAL = [
    {"lengths": (2, 7), "horizontal_tokens": 2},
    {"lengths": (2, 8), "rounds": (2,), "verifiers": ("block", "none"), "horizontal_tokens": 3},
    {
        "lengths": (1, 3, 8),
        "rounds": (2, 2),
        "stopping": ("entropy", "fixed", "entropy"),
        "horizontal_tokens": 2,
    },
]


def without_rounds(case: dict) -> dict:
    return {key: value for key, value in case.items() if key != "rounds"}


CASES = [
    *PLAIN,
    *({**case, **ENDS} for case in BY_ENTROPY),
    *({**case, "seed": 4} for case in HORIZONTAL),
]
ON_A_CPU = [*CASES, *({**without_rounds(case), "seed": 5} for case in PLAIN[2:5])]


@pytest.mark.parametrize("case", [*CASES, *({**case, "host": True} for case in ON_A_CPU)])
def test_token_for_token_as_the_cascade(case):
    """Up to max_model_len, with caches that only the program itself keeps up to date."""
    engine, rng, filled = Engine(**case), np.random.default_rng(0), []
    ends = engine.thresholds is not None and not engine.host
    tail = 0 if engine.host else case.get("horizontal_tokens", 0)
    if engine.thresholds is None:
        # A greedy request among the others.
        engine.temperature[int(engine.index[0])] = 0
    for _ in range(9):
        drafts = engine.propose()
        assert drafts == engine.host_drafts()
        filled += [len(draft) for draft in drafts]
        for b, draft in enumerate(drafts):
            if draft and tail and not ends:
                mine = engine.state.rows[-1][b, : len(draft)][-tail:]
                assert mine.equal(engine.state.rows[0][b, :tail])
        engine.keep_some(drafts, rng)
        if ends:
            own, theirs = engine.index.long(), engine.host_thresholds
            assert engine.thresholds.count[:, own].tolist() == theirs.count.tolist()
            # Kernels add entropies of float32.
            mine, wanted = engine.thresholds.total[:, own], torch.from_numpy(theirs.total)
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
    longest = case["lengths"][-1]
    assert max(filled) == longest or case.get("rounds")
    if ends:
        moved = engine.host_thresholds.count.sum(1) > 0
        assert moved.tolist() == [stop == "entropy" for stop in case["stopping"]]
        assert min(filled[12:]) < longest
    if tail:
        assert min(filled) == 0


def test_other_uniforms_give_other_tokens():
    """Negative control of the comparison above."""
    engine = Engine((2, 6))
    drafts = engine.propose()
    engine.seeds += 1
    assert drafts != engine.host_drafts()


def test_a_hole_in_a_cache_is_caught():
    """Negative control: with a shorter first pass a level sees what it has not computed."""
    engine = Engine((2, 6))
    drafts = engine.propose()
    for b, draft in enumerate(drafts):
        engine.commit(b, [*draft, 0])
    for level in engine.levels:
        for slot in engine.index.tolist():
            level.cache[level.places(slot, int(engine.length[slot]))[-4]] = -1
    assert engine.propose() != engine.host_drafts()


@pytest.mark.parametrize("keyed_by_position", [False, True])
def test_no_uniform_is_met_twice(keyed_by_position, monkeypatch):
    """Over proposals with preemption, skipped steps and a request in another one's slot."""
    engine, rng = Engine((2, 3, 6), (2, 2), seed=3), np.random.default_rng(1)
    state, all_slots = engine.state, engine.index.clone()
    # (seed, stream, draw) of all uniforms that decide something.
    met: list[tuple[int, int, int]] = []
    if keyed_by_position:
        # Negative control: draws that move on by one with every token, as positions do.
        monkeypatch.setattr("vllm_hsd.cascade.cascade_steps.DRAWS_PER_LENGTH", 1)
    draw, verify = program.sample_row, program.verify_chain_padded

    def sample_row(logits, temperature, seeds, draws, **given):
        for b in torch.nonzero(state.drafted[0] < state.requested[0])[:, 0].tolist():
            met.append((int(seeds[b]), given["level"], int(draws[b]) + given["draw_offset"]))
        return draw(logits, temperature, seeds, draws, **given)

    def verify_chain_padded(*rows, **given):
        for b in torch.nonzero(state.origin >= 0)[:, 0].tolist():
            first = int(state.draws[b]) + given["draw_offset"]
            draws = range(first, first + int(given["draft_length"][b]) + 1)
            met.extend((int(state.seeds[b]), given["level"], draw) for draw in draws)
        return verify(*rows, **given)

    monkeypatch.setattr(program, "sample_row", sample_row)
    monkeypatch.setattr(program, "verify_chain_padded", verify_chain_padded)
    for step in range(8):
        # Requests leave the batch for a step, and the batch changes its order.
        present = torch.from_numpy(rng.permutation(3)[: rng.integers(1, 4)])
        engine.index = all_slots[present]
        drafts = engine.propose()
        if step == 3:
            # Preempted before the target saw the proposal: the same text, the same uniforms,
            # and the same draft again.
            before = len(met)
            assert engine.propose() == drafts
            del met[before:]
        engine.keep_some(drafts, rng)
        if step == 5:
            # Its slot goes to a new request.
            slot = int(all_slots[0])
            engine.seeds[slot] += 12345
            engine.length[slot] = 9
    assert len(met) > 150
    assert (len(set(met)) == len(met)) is not keyed_by_position
