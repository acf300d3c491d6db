"""Cascades on the sampling side of vLLM's runner, with tables in the place of models."""

import dataclasses
import itertools
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from support.exact_joint_distribution import chi_square_p_value
from support.marks import slow
from support.proposal_states import schedule_of
from support.table_drafters import CascadeSpeculator, DraftModelSpeculator, cascade, tables
from support.table_runner import TableRunner, joint
from vllm.model_executor.models.interfaces import supports_multimodal_embeddings

from benchmarks.gpu import faults
from vllm_hsd.cascade import cascade_steps, program
from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.proposal_state import ProposalState
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.host.base_speculator import BaseSpeculator
from vllm_hsd.host.host_speculator import HostSpeculator


def runner(params, name, steps: int = 0):
    # As long as the widest window of a cascade, so that the first step drafts.
    served = TableRunner(*tables(), params, length=4, prompt_length=4, cascade=cascade(name))
    for _ in range(steps):
        served.step()
    return served


def model_beside(served) -> list:
    """Passes over texts of a model that the runner's drafter has next to its tables."""
    passes: list = []
    compute = SimpleNamespace(in_target_cache=False, compute=lambda *args: passes.append(args))
    served.drafter.hosted = [compute]
    return passes


def is_greedy(served) -> bool:
    best = served.target.argmax(1).tolist()
    pairs = (pair for text in served.texts() for pair in itertools.pairwise(text[3:]))
    return all(after == best[before] for before, after in pairs)


@pytest.mark.parametrize(
    "name",
    [
        *("one", "two", "three", "lookup", "bigram", "suffix", "sources", "choice"),
        *("unverified", "entropy", "pairs above"),
        *slow("choice below", "choice of pairs", "horizontal", "horizontal lookup", "pairs"),
    ],
)
def test_greedy_text_is_the_targets(name):
    served = runner([{"temperature": 0.0}] * 3, name, steps=4)
    assert is_greedy(served) and served.accepted > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_levels_equal_to_the_target_lose_nothing(temperature):
    served = runner([{"temperature": temperature}] * 3, "equal", steps=4)
    drafted, accepted = served.drafter.state.counts[0, :2].tolist()
    assert accepted == drafted > 0
    assert served.accepted == served.verified > 0


@pytest.mark.parametrize(
    "name",
    [
        *("two", "two, adaptive", "three", "lookup", "bigram", "suffix", "sources", "choice"),
        *("choice below", "unverified", "entropy", "entropy, unverified"),
        *("horizontal", "horizontal lookup", *slow("pairs", "pairs above")),
    ],
)
def test_text_follows_the_target(name):
    assert p_value(name) > 1e-6


@pytest.mark.parametrize("name", ["two", *slow("choice")])
def test_filtered_text_follows_the_target(name):
    assert p_value(name, {"top_p": 0.8, "temperature": 0.9}) > 1e-6


@pytest.mark.parametrize("name", ["two", "three"])
def test_wrong_rows_of_the_drafts_are_caught(name, monkeypatch):
    """Negative control of the comparison above, with as many texts."""
    faults.install(monkeypatch.setattr)
    assert p_value(name) < 1e-6


@pytest.mark.parametrize("name", ["sources", *slow("suffix")])
def test_tokens_of_a_lookup_that_are_taken_unseen_are_caught(name, monkeypatch):
    """Negative control: the level above passes them up as if it had drawn them."""
    verify = program.verify_chain_padded

    def take_all(logits, *args, **kwargs):
        result = verify(logits, *args, **kwargs)
        taken, own = kwargs["draft_length"], torch.arange(len(result.num_accepted))
        token_ids = result.token_ids.clone()
        token_ids[own, taken.long()] = token_ids[own, result.num_accepted.long()]
        lse = logits.logsumexp(1).view(result.target_lse.shape)
        return type(result)(token_ids, taken, taken + 1, lse)

    monkeypatch.setattr(program, "verify_chain_padded", take_all)
    assert p_value(name) < 1e-6


def test_point_masses_with_a_model_s_row_are_caught(monkeypatch):
    """Negative control of tokens that a level passes on."""
    commit = cascade_steps.commit_unverified

    def with_own_row(state, op, logits, token_ids, lse, thresholds, taken):
        first = state.origin.tolist()
        commit(state, op, logits, token_ids, lse, thresholds, taken)
        for b, (origin, count) in enumerate(zip(first, taken.tolist(), strict=True)):
            if origin >= 0:
                state.rows[op.level][b, origin : origin + count] = logits[b]
                state.lse[op.level][b, origin : origin + count] = lse[b]

    monkeypatch.setattr(cascade_steps, "commit_unverified", with_own_row)
    assert p_value("unverified") < 1e-6


def test_rows_of_another_length_are_caught(monkeypatch):
    """Negative control: the verifier reads what the longest drafts of earlier steps left."""
    shortened = ProposalState.shortened

    def with_own_rows(self, schedule):
        state = shortened(self, schedule)
        state.rows = [rows.clone() for rows in state.rows]
        return state

    monkeypatch.setattr(ProposalState, "shortened", with_own_rows)
    assert p_value("two, adaptive") < 1e-6


def p_value(name: str, params: dict | None = None) -> float:
    """Of three tokens of 3,000 texts against their joint distribution."""
    params = params or {}
    served = runner([params] * 3000, name)
    lengths = itertools.cycle([2, 4] if served.drafter.shorter else [None])
    while min(map(len, served.texts())) <= 7:
        served.drafter.asked = next(lengths)
        served.step()
    texts = [tuple(text[4:7]) for text in served.texts()]
    found = chi_square_p_value(texts, joint(params, 3))
    print(name, params, found)
    return found


def test_a_request_without_a_proposal_has_no_drafts():
    """Its row is stale: another batch was drafted for since."""
    served = runner([{"temperature": 1.0}] * 3, "two", steps=1)
    served.drafter.state.row_of_slot[served.slots[1]] = -1
    assert served.step().num_sampled[1] == 1


def limited(whole, batch: int):
    """A state for fewer requests, which still holds what was drafted for more."""
    drafts = {name: getattr(whole, name) for name in ("draft_length", "rows", "lse")}
    return dataclasses.replace(whole.bucket(batch), **drafts)


def test_above_the_batch_limit_a_step_of_decodes_runs_no_level():
    """Its requests draft nothing later: the levels have not read all of their texts."""
    served = runner([{"temperature": 0.0}] * 3, "equal")
    passes = model_beside(served)
    served.step()
    assert served.step().num_sampled.max() > 1 and not passes
    whole = served.drafter.state
    served.drafter.state = limited(whole, 2)
    served.step()
    assert served.step().num_sampled.tolist() == [1, 1, 1] and not passes
    served.drafter.state = whole
    # A request that begins anew in a slot is read from its first token.
    served.drafter.stale[served.slots[0]] = False
    served.step()
    drafted = served.step().num_sampled
    assert drafted[0] > 1 and drafted[1:].tolist() == [1, 1]
    assert is_greedy(served) and not passes and served.drafter.stale.sum() == 2


def test_requests_of_vllms_warm_up_draft_after_a_batch_above_the_limit():
    """It decodes the largest batch first: kernels of proposals would not be compiled."""
    served = runner([{"temperature": 0.0}] * 3, "equal")
    served.step()
    whole, served.drafter.names = served.drafter.state, "_warmup_"
    served.drafter.state = limited(whole, 2)
    served.step()
    served.drafter.state = whole
    assert not served.drafter.stale.any()
    served.step()
    assert (served.step().num_sampled > 1).all()


@pytest.mark.parametrize("name", ["bigram", "lookup", "pairs"])
def test_above_the_batch_limit_what_keeps_no_cache_misses_nothing(name):
    """And an exit reads the target's own: its requests draft again."""
    served = runner([{"temperature": 0.0}] * 3, name)
    drafter = served.drafter
    drafter.hosted = [None, SimpleNamespace(in_target_cache=True)]
    served.step()
    whole = drafter.state
    drafter.state, drafter.asked = limited(whole, 2), 0
    served.step()
    drafter.state, drafter.asked = whole, None
    served.step()
    assert (drafter.state.row_of_slot >= 0).sum() == 3 and not drafter.stale.any()


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_step_that_drafts_nothing_is_read_where_a_later_one_may_draft(adaptive):
    """vLLM 0.33 asks for none in the last step of all requests; a learned length may be 0."""
    served = runner([{"temperature": 0.0}] * 2, "two, adaptive" if adaptive else "two")
    passes = model_beside(served)
    served.step()
    served.drafter.asked = 0
    served.step()
    assert len(passes) == adaptive


def test_a_proposal_is_staged_before_prompts_are_read(monkeypatch):
    """What it reads is of buffers that the runner uses in turn."""
    served, order = runner([{}] * 2, "two", steps=1), []
    drafter, stage = served.drafter, served.drafter._stage
    monkeypatch.setattr(drafter, "_stage", lambda *args: (order.append("stage"), stage(*args)))
    monkeypatch.setattr(drafter, "_ingest", lambda *args: order.append("read"))
    batch = served.input_batch()
    batch.has_prefill, batch.prefill_len_np = True, np.array([4, 4])
    batch.is_prefilling_np = np.array([True, False])
    drafter.propose(batch, {}, {}, None, None, torch.ones(2, dtype=torch.int32), *[None] * 5)
    assert order == ["stage", "read"]


def test_the_target_is_never_the_draft_model():
    """Else vLLM loads a drafter's weights into it, and gathers encoder outputs in every step."""
    target = torch.nn.Linear(2, 2)
    target.supports_multimodal_embeddings = True
    drafter = object.__new__(CascadeSpeculator)
    drafter.hsd, drafter.hosted = SimpleNamespace(levels=[SimpleNamespace(last_drafts_by="")]), []
    found = drafter.load_draft_model(target, set())
    assert not list(found.parameters()) and not supports_multimodal_embeddings(found)


@pytest.mark.parametrize(
    ("levels", "prompt", "stale"), [(1, 1, False), (3, 1, True), (3, 2, False), (4, 2, True)]
)
def test_prompts_that_leave_a_hole_below_the_window_never_draft(levels, prompt, stale):
    """Levels read prompts in any batch, here in one that is too large to draft."""
    served = runner([{}] * 3, "two")
    passes = model_beside(served)
    shortest = schedule_of(*range(2, levels + 2)).shortest_prompt
    served.drafter.schedule = SimpleNamespace(shortest_prompt=shortest)
    served.drafter.stale[:] = True
    batch = SimpleNamespace(
        num_reqs=2,
        has_prefill=True,
        num_tokens_after_padding=0,
        input_ids=served.slots[:0],
        positions=served.slots[:0],
        idx_mapping_np=np.array([2, 0]),
        prefill_len_np=np.array([prompt, prompt]),
        is_prefilling_np=np.array([True, False]),
    )
    served.drafter.state = served.drafter.state.bucket(1)
    nothing = torch.zeros(2, dtype=torch.int32)
    served.drafter.propose(batch, {}, {}, None, None, nothing, *[None] * 5)
    assert served.drafter.stale.tolist() == [True, True, stale] and len(passes) == 1


@pytest.mark.parametrize(
    ("levels", "lengths", "mistake"),
    [
        ([0, 1], [2, 5], "not among those"),
        ([1, 0], [2, 4], "not among those"),
        ([0], [2], "another temperature_scale"),
    ],
)
def test_what_cannot_be_selected_is_refused(levels, lengths, mistake):
    speculator = SimpleNamespace(
        schedule=SimpleNamespace(draft_lengths=(2, 4)), hsd=SimpleNamespace(scales_differ=True)
    )
    with pytest.raises(ValueError, match=mistake):
        HostSpeculator.select_levels(speculator, levels, lengths)


@pytest.mark.parametrize(
    ("method", "given", "longest"),
    [("draft_model", None, 32), ("eagle3", None, 64), ("eagle3", 32, 32)],
)
def test_a_head_of_a_short_context_drafts_up_to_the_targets(method, given, longest):
    """vLLM gives it the target's positions; a drafter of its own ends where its context does."""
    short = SimpleNamespace(max_model_len=32)
    level = SimpleNamespace(method=method, max_model_len=given, draft_model_config=short)
    speculator = SimpleNamespace(
        speculative_config=SimpleNamespace(level_configs=[None, level]),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=64)),
    )
    assert BaseSpeculator.max_model_len.fget(speculator) == longest


def test_what_is_made_before_the_weights_and_follows_the_configuration(monkeypatch):
    """Sleep mode discards what is allocated with the weights; vLLM may shorten texts later."""
    given = {"num_speculative_tokens": 4, "levels": [{"ngram": {"max": 2}, "num_tokens": 1}]}
    given["levels"].append({"model": "m"})
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            max_model_len=64, get_vocab_size=lambda: 7, is_multimodal_model=False
        ),
        speculative_config=SimpleNamespace(
            hsd=CascadeConfig.parse(given),
            level_configs=[None, None],
            hsd_level_names=["levels[0]", "levels[1]"],
            max_batch_size=lambda scheduler_config: scheduler_config.max_num_batched_tokens // 5,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=20),
    )

    def init(self, vllm_config, device):
        self.vllm_config, self.speculative_config = vllm_config, vllm_config.speculative_config
        self.max_model_len = vllm_config.model_config.max_model_len  # as in vLLM 0.32
        self.max_num_reqs, self.dtype = 9, torch.float32

    monkeypatch.setattr(DraftModelSpeculator, "__init__", init)
    drafter = CascadeSpeculator(config, torch.device("cpu"))
    assert drafter.state.rows[0] is None and drafter.state.rows[1].shape[1:] == (4, 7)
    # No more requests than the configuration says, to the scheduler too.
    assert drafter.state.batch == 4
    config.model_config.max_model_len = 32
    assert drafter.max_model_len == 32


def test_counts_of_the_levels():
    """Once per token: the target's acceptance is counted with the next proposal."""
    served = runner([{"temperature": 1.0}] * 3, "two", steps=3)
    counts = served.drafter.counts
    rows = counts.take().rows
    lower, top = rows
    assert top[Count.accepted] == served.accepted > 0
    assert top[Count.rounds] == 9 and top[Count.drafted] <= 9 * 4
    assert 0 < lower[Count.accepted] < lower[Count.drafted] <= lower[Count.rounds]
    # Two rounds of a draft token and a verification each, in three proposals.
    assert rows[:, Count.forwards].tolist() == [6, 6]
    assert not counts.take().rows[:, Count.drafted].any()
    before = served.accepted
    # As in a step with too many requests: nothing is drafted, and the last acceptance is counted.
    served.drafter.asked = 0
    served.step()
    rows = counts.take().rows
    assert rows[1, Count.accepted] == served.accepted - before
    assert not rows[:, Count.drafted].any() and not rows[1, Count.forwards]
    assert served.step().num_sampled.tolist() == [1, 1, 1]


def test_counts_wait_for_the_device():
    """Negative control of a copy under way: nothing is taken, and nothing twice."""
    served = runner([{"temperature": 1.0}] * 3, "two")
    counts = served.drafter.counts
    counts.arrived = mock.Mock(query=lambda: False)
    for _ in range(2):
        served.step()
        assert counts.take() is None
    counts.arrived = mock.Mock(query=lambda: True)
    first, second = (counts.take().rows[:, Count.drafted] for _ in range(2))
    total = served.drafter.state.counts[:, 0].tolist()
    assert (first + second).tolist() == total
    assert 0 < first[1] < total[1]
