"""Drafts under a grammar: which of them the scheduler knows, and what becomes of the others."""

from types import SimpleNamespace
from unittest import mock

import torch
from support.engines import configure
from support.table_drafters import tables
from support.table_runner import TableRunner
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu.structured_outputs import grammar_invalid_drafts

from vllm_hsd.host.engine_hooks import NeedsHooks
from vllm_hsd.host.grammar_drafts import update_draft_token_ids

LENGTH, SIZE = 4, 32


def scheduled(config, *, refused: bool = True, structured: bool = True, prompt: bool = False):
    """What a request's draft of three tokens is to the scheduler, after vLLM's own look at it."""
    request = SimpleNamespace(use_structured_output=structured, is_prefill_chunk=prompt)
    scheduler = SimpleNamespace(
        vllm_config=SimpleNamespace(speculative_config=config), requests={"a": request}
    )

    def original(self, drafts):
        request.spec_token_ids = [] if prompt else [5, 6, 7][: 1 if refused else 3]

    drafts = SimpleNamespace(req_ids=["ended", "a"], draft_token_ids=[[8], [5, 6, 7]])
    update_draft_token_ids(original, scheduler, drafts)
    return request.spec_token_ids


def test_the_token_that_a_grammar_refuses_is_scheduled():
    """As a placeholder, which is verified; its mask allows nothing."""
    assert scheduled(NeedsHooks()) == [5, -1]
    assert scheduled(NeedsHooks(), refused=False) == [5, 6, 7]
    # What is cut for another reason, or for another verifier, stays cut.
    assert scheduled(NeedsHooks(), structured=False) == scheduled(None) == [5]
    assert scheduled(NeedsHooks(), prompt=True) == []


def async_scheduler(family) -> AsyncScheduler:
    """Of vLLM, with room for two requests that draft and a token; its grammars are doubles."""
    drafts = {"method": "draft_model", "model": family.small, "num_speculative_tokens": LENGTH}
    config = configure(
        family,
        {**drafts, "rejection_sample_method": "hierarchical"},
        max_num_batched_tokens=13,
        max_num_seqs=8,
        block_size=SIZE,
        enable_prefix_caching=False,
    )
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = 100
    spec = FullAttentionSpec(SIZE, num_kv_heads=1, head_size=32, dtype=torch.float32)
    manager = mock.MagicMock()
    manager.grammar_bitmask.return_value = None
    manager.validate_tokens.side_effect = lambda request, tokens: tokens[:2]
    caches = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)])
    return AsyncScheduler(config, caches, manager, SIZE, hash_block_size=SIZE)


def add_request(scheduler: AsyncScheduler, name: str, max_tokens: int, grammar: bool) -> None:
    constraint = StructuredOutputsParams(json="{}") if grammar else None
    params = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, structured_outputs=constraint
    )
    request = Request(name, [1, 2, 3], params, pooling_params=None)
    if grammar:
        request.structured_output_request.grammar = mock.MagicMock()
    scheduler.add_request(request)


def test_drafts_of_a_request_that_waited_are_told_from_those_that_a_grammar_refuses(family):
    scheduler = async_scheduler(family)
    for name, max_tokens in (("a", 12), ("b", 40), ("waits", 40)):
        add_request(scheduler, name, max_tokens, grammar=name == "waits")
    under_way, found = [], []
    while len(found) < 3:
        output = scheduler.schedule()
        under_way.append(output)
        draft = output.scheduled_spec_decode_tokens.get("waits")
        if draft is not None:
            waits_for_drafts = output.pending_structured_output_tokens
            if waits_for_drafts:
                drafts = DraftTokenIds(["waits"], [[5] * LENGTH])
                scheduler.update_draft_token_ids_in_output(drafts, output)
            (limit,) = scheduler.get_grammar_bitmask(output).num_acceptable_drafts
            found.append((waits_for_drafts, limit))
        if len(under_way) == 2:
            done = under_way.pop(0)
            names = list(done.num_scheduled_tokens)
            drafted = (done.scheduled_spec_decode_tokens.get(name, ()) for name in names)
            tokens = [[7] * (1 + len(each)) for each in drafted]
            places = {name: i for i, name in enumerate(names)}
            scheduler.update_from_output(done, ModelRunnerOutput(names, places, tokens))
    assert set(found) == {(False, -1), (True, 2)}


def test_a_draft_that_no_grammar_has_read_ends_before_its_first_token():
    target, draft = tables()
    runner = TableRunner(target, draft, [{"seed": None}] * 8, length=3)
    runner.step()
    batch = runner.input_batch()
    batch.req_ids, batch.num_draft_tokens_per_req = list("abcdefgh"), torch.full((8,), 3).numpy()
    for limit, single in ((-1, True), (0, False)):
        invalid = grammar_invalid_drafts(batch, batch.req_ids, [limit] * 8)
        sampled = runner.step(invalid).num_sampled
        assert bool((sampled == 1).all()) == single
