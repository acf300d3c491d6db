"""The CPU's program against the reference cascade, whatever levels take part in a step."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from host.test_program import PLAIN, without_rounds
from support.programs import MAX_NUM_REQS, PROMPT, Engine

from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.level import StepLevels
from vllm_hsd.cascade.program import ProgramSources
from vllm_hsd.host.base_speculator import BaseSpeculator
from vllm_hsd.host.host_program import HostProgram
from vllm_hsd.host.host_speculator import HostSpeculator
from vllm_hsd.host.level_caches import LevelCaches

# A level that is left out passes rows on, which are read at its temperature.
ONE_SCALE = torch.ones(3)
TWO_SHARE_A_BLOCK = torch.tensor([[1, 2], [1, 3]])


def selection(rng: np.random.Generator, lengths, requests: int) -> StepLevels | None:
    """Any levels, with drafts of any lengths; now and then all, or none."""
    kind = rng.integers(0, 5)
    if kind == 0:
        return None
    taken = tuple(k for k in range(len(lengths)) if rng.integers(0, 2)) if kind > 1 else ()
    drafts = tuple(int(rng.integers(1, lengths[k] + 1)) for k in taken)
    most = rng.integers(0, lengths[-1] + 1, requests) if kind > 2 else None
    if taken:
        most = np.minimum(np.full(requests, drafts[-1]) if most is None else most, drafts[-1])
    return StepLevels(taken, drafts, most)


SELECTED = [case for case in PLAIN if "none" not in case.get("verifiers", ())]


@pytest.mark.parametrize("case", SELECTED)
@pytest.mark.parametrize("seed", range(3))
def test_any_levels_of_a_step_as_the_cascade(case, seed):
    case = {"vocabulary": 7, **without_rounds(case), "seed": seed}
    engine, rng, drafted = Engine(**case, host=True), np.random.default_rng(seed), set()
    engine.scales = ONE_SCALE[: len(case["lengths"])]
    for _ in range(12):
        taken = selection(rng, case["lengths"], len(engine.index))
        drafts = engine.propose(taken)
        assert drafts == engine.host_drafts(taken)
        if any(drafts):
            drafted.add(None if taken is None else taken.levels)
        engine.keep_some(drafts, rng)
    assert len(drafted) > (len(case["lengths"]) > 1)


def test_a_level_that_is_left_out_passes_on_what_its_own_drafts_hold():
    engine = Engine((6, 3, 10), host=True, seed=4)
    engine.scales = ONE_SCALE
    assert engine.schedule.lengths_for_target == (3, 3, 10)
    drafts = engine.propose(StepLevels((0,), (6,)))
    assert [len(draft) for draft in drafts] == [3] * len(drafts)


@pytest.mark.parametrize("lengths", [(4,), (2, 6), (1, 3, 7)])
def test_caches_that_claim_too_much_are_seen(lengths, monkeypatch):
    """Negative control: a level that has missed a token drafts others, or none."""
    forget = HostProgram._forget_rejected

    def forget_too_little(program, *given):
        forget(program, *given)
        program.caches.computed += 1

    monkeypatch.setattr(HostProgram, "_forget_rejected", forget_too_little)
    engine, rng = Engine(lengths, host=True, seed=2), np.random.default_rng(0)
    with pytest.raises(AssertionError):
        for _ in range(6):
            drafts = engine.propose()
            assert drafts == engine.host_drafts()
            engine.keep_some(drafts, rng)


def passes(engine: Engine) -> list[int]:
    """Forward passes of each level since the last call."""
    return engine.program.counts.take().rows[:, Count.forwards].tolist()


def test_only_what_is_wanted_runs():
    """Rounds go on until a draft is full, and no pass runs that no request wants."""
    engine = Engine((2, 6), host=True, seed=2, greedy=True)
    engine.propose()
    assert passes(engine)[1] >= 2
    engine.propose(StepLevels((0,), (2,)))
    assert passes(engine) == [2, 0]
    engine.propose(StepLevels((1,), (6,)))
    assert passes(engine) == [0, 6]
    engine.propose(StepLevels())
    assert passes(engine) == [0, 0]
    assert (engine.length[engine.index.long()] == PROMPT).all()


def looked_up(state) -> None:
    """A lookup that always has as many tokens as were requested."""
    for b in range(state.batch):
        start, count = int(state.end[b]), int(state.requested[0, b])
        assert start + count <= state.window.shape[1]
        places = torch.arange(start, start + count, dtype=torch.int32)
        state.window[b, start : start + count] = (7 * places + b) % 3
        state.end[b], state.drafted[0, b] = start + count, count


def test_drafts_are_counted_for_the_level_that_drew_them():
    """Not for the one between it and the verifier, which was left out."""
    engine = Engine((3, 3, 9), host=True, seed=4)
    engine.scales = ONE_SCALE
    engine.propose(StepLevels((0, 2), (3, 9)))
    lowest, left_out, _ = engine.state.counts.tolist()
    assert min(lowest[:3]) > 0 and not any(left_out)


def test_a_block_that_changes_hands_in_a_step_holds_nothing_of_its_next_owner():
    """The second request hits a block that the first one is to fill in the same step."""
    assert not caches_of([0, 16], [20, 4]).computed.any()


def test_a_block_that_a_session_goes_on_in_is_not_whole():
    """A level has read past the stop token of its last turn, to the block's end."""
    caches = caches_of([24, 16], [8, 16])
    assert caches.blocks.filled.tolist() == [[True, True, False, False]]
    assert caches.computed.tolist() == [[16, 16]]


def test_what_a_connector_has_loaded_is_read_anew():
    """Its block was a request's before, whose text a level had read."""
    assert caches_of([16, 16], [4, 4]).computed.tolist() == [[16, 16]]
    assert not caches_of([16, 16], [4, 4], connector=object()).computed.any()


def test_a_long_text_is_read_in_parts():
    """All requests wait for a step."""
    caches = caches_of([0, 0], [8, 8], table=torch.arange(64).view(2, 32) + 1, filled=False)
    caches._compute, ends = mock.Mock(), np.array([500, 30])
    parts = [caches.read(0, np.arange(2), ends) for _ in range(6)]
    assert parts == [120, 120, 120, 120, 50, 0]
    assert caches.computed.tolist() == [ends.tolist()]


def test_a_request_whose_text_is_read_in_parts_drafts_later():
    engine = Engine((2, 6), host=True, seed=2, greedy=True)
    limited = engine.program.caches.speculator
    # Each level reads the prompt of one request, as the others wait.
    limited.max_num_tokens = PROMPT - 1
    parts = [engine.propose() for _ in range(3)]
    assert [[bool(draft) for draft in part].count(True) for part in parts] == [1, 2, 3]
    assert parts[2] == engine.host_drafts()
    assert all(not draft or draft in parts[2] for part in parts for draft in part)


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 2, 0]])
@pytest.mark.parametrize(("connector", "read"), [(None, 40 + 8 + 8), (object(), 3 * 40)])
def test_a_prefix_that_requests_share_is_read_once(connector, read, order):
    """Of requests that come together, when no level has read anything."""
    table = torch.tensor([[1, 2, 3], [1, 2, 4], [1, 2, 5]])[order]
    starts, counts = np.array([0, 32, 32])[order], np.array([40, 8, 8])[order]
    caches = caches_of(starts, counts, connector, table, filled=False)
    # The first one's are not known to be those of the others, two of which halve 32 tokens.
    missed = caches.missed(0, np.arange(3), np.full(3, 40))
    assert (
        missed.tolist() == np.where((starts == 0) | (connector is not None), 40, 40 - 16).tolist()
    )
    caches._compute, slots = mock.Mock(), np.arange(3)
    assert caches.read(0, slots, np.full(3, 40)) == read
    assert (caches.computed == 40).all()
    assert sum(call.args[3].sum() for call in caches._compute.call_args_list) == read
    assert caches.read(0, slots, np.full(3, 40)) == 0


def caches_of(
    starts: list[int],
    counts: list[int],
    connector: object = None,
    table: torch.Tensor = TWO_SHARE_A_BLOCK,
    filled: bool = True,
) -> LevelCaches:
    """After a step of new requests, of a level that had filled all blocks or none."""
    tables = SimpleNamespace(block_sizes=[16], block_tables=[SimpleNamespace(gpu=table)])
    config = SimpleNamespace(kv_transfer_config=connector)
    speculator = SimpleNamespace(block_tables=tables, vllm_config=config, max_num_tokens=120)
    caches = LevelCaches(speculator, [object()], len(table))
    caches.blocks.filled = np.full((1, int(table.max()) + 1), filled)
    batch = SimpleNamespace(
        num_reqs=len(table),
        idx_mapping_np=np.arange(len(table)),
        num_computed_tokens_np=np.array(starts),
        num_scheduled_tokens=np.array(counts),
    )
    caches.step_began(batch, np.ones(len(table), dtype=bool))
    return caches


def test_a_step_without_drafts_has_no_branches_of_the_last_one():
    served = mock.Mock(head=None, budget=None, buckets={1: mock.Mock()}, state=mock.Mock(batch=4))
    batch = mock.Mock(num_reqs=1, idx_mapping_np=np.zeros(1, dtype=np.int64))
    for drafts in (True, False):
        served.program.drafts = np.array([drafts])
        HostSpeculator._propose(served, (batch,), None, None, 3)
        assert served.branches.none.called is not drafts


def test_drafts_that_no_step_has_verified_teach_nothing():
    """A request that sat out the step after its proposal: its list is fed, and not looked at."""
    state = SimpleNamespace(row_of_slot=torch.tensor([-1, 0]))
    served = mock.Mock(state=state, forced=np.zeros(2, dtype=np.int64), branches=None)
    served.program.chosen, served.parameters.entered = None, np.zeros(2, dtype=bool)
    served.budget.awaits_verdict = np.ones(2, dtype=bool)
    batch = mock.Mock()
    HostSpeculator._take_in(served, batch, np.arange(2), torch.ones(2), torch.ones(2))
    assert served.budget.awaits_verdict.tolist() == [False, True]


@pytest.mark.parametrize("lookup", [looked_up, None], ids=["lookup", "model"])
def test_nothing_is_drafted_for_a_request_whose_draft_has_ended(lookup):
    """While another request's draft goes on."""
    engine = Engine((3, 9), batch=2, requests=2, vocabulary=3, lookup=lookup, host=True)
    first, asked = int(engine.index[0]), []

    def goes_on(level, slots, estimates, drafted):
        asked.append((slots.tolist(), np.isnan(estimates[:, : drafted.min()]).any()))
        return slots != first

    engine.program.budget = mock.Mock(ends=bool, goes_on=goes_on)
    drafts = engine.propose()
    at_first, *later = [slots.count(first) for slots, _ in asked]
    assert at_first == 1 and later and not any(later)
    assert not any(unknown for _, unknown in asked)
    assert len(drafts[0]) < len(drafts[1]) == 9
    ends = [engine.schedule.window + len(draft) for draft in drafts]
    assert engine.state.end.tolist() == ends


def test_next_to_lookups_a_model_drafts_for_none_whose_text_it_has_not_read():
    """Its tokens would be noise, and be judged as its own."""
    drawn, kept = torch.ones(MAX_NUM_REQS + 1), []

    def nothing(state):
        pass

    def prefers(state):
        return torch.arange(state.batch) == 1

    def choose(state):
        kept.append((state.drafted[0].tolist(), state.requested[0].tolist()))

    sources = ProgramSources(nothing, choose, drawn, prefers, lambda: True)
    engine = Engine((3,), batch=2, requests=2, sources=sources, host=True)
    engine.program.trials = mock.Mock(due=lambda _: False)
    engine.propose()
    assert engine.program.lazy and kept == [([0, 3], [3, 3])]


@pytest.mark.parametrize("pictures", [True, False])
def test_placeholders_that_a_target_has_no_embedding_for_are_not_drafted(pictures):
    """Text holds them where it holds pictures."""
    speculator = SimpleNamespace(
        has_placeholders=pictures,
        draft_tokens=torch.zeros(2, 3, dtype=torch.int64),
        branches=None,
        vocab_size=8,
    )
    found = torch.tensor([[7, 8 * pictures, 1], [1, -1, 400 * pictures]])
    state = SimpleNamespace(draft_tokens=found, longest=3)
    handed = BaseSpeculator._hand_over(speculator, state, np.arange(2))
    assert handed.tolist() == [[7, 0, 1], [1, -1, 0]]
