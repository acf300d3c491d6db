"""Full CUDA graphs of the target's steps with branches, recorded and replayed on a CPU."""

import copy
import itertools
import random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from engines.test_branches import texts
from engines.test_drawn_branches import BASE, PLAIN
from support import drawn_branches, engines, hosted_branches, recorded_graph
from support.engines import ids
from support.hosted_branches import Oracle, runner_of

from vllm_hsd.host.branches import HostedBranches

pytestmark = pytest.mark.usefixtures("as_on_gpus")


def replan_inside_of_graphs(runner) -> None:
    """The CPU's attention plans its work on the host; a GPU's does so in its kernels."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    builders = {
        name: group.get_metadata_builder(0)
        for groups in runner.attn_groups
        for group in groups
        for name in group.layer_names
    }
    forward = CPUAttentionBackendImpl.forward

    def planned(self, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs):
        if metadata is not None:
            recorded_graph.plan_again(builders[layer.layer_name], metadata)
        return forward(self, layer, query, key, value, kv_cache, metadata, output, *args, **kwargs)

    CPUAttentionBackendImpl.forward = planned
    for layer in runner.compilation_config.static_forward_context.values():
        # One opaque operation would look its arguments up at every replay.
        layer.use_direct_call = True


def capture(runner, requests: list[int]) -> dict[tuple[int, int], Any]:
    """Let the target's steps be recorded graphs: (tokens of each request, requests) -> graph."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    recorded_graph.install()
    replan_inside_of_graphs(runner)
    config, length = runner.vllm_config, runner.decode_query_len
    sizes = [length * n for n in requests]
    config.compilation_config.cudagraph_capture_sizes = sizes
    config.compilation_config.max_cudagraph_capture_size = sizes[-1]
    mode = CUDAGraphMode.FULL_DECODE_ONLY
    manager = runner.cudagraph_manager = ModelCudaGraphManager(config, runner.device, mode, length)
    runner.speculator.init_cudagraph_manager(CUDAGraphMode.NONE)
    inputs = runner.model, runner.model_state, runner.input_buffers, None, runner.block_tables
    manager.capture(*inputs, runner.attn_groups, runner.kv_cache_config)
    return {(d.uniform_token_count, d.num_reqs): graph for d, graph in manager.graphs.items()}


def in_graphs(llm, work, looked_for=lambda hosted, batch: False):
    """What an engine's process does: jobs, then one of them without what replays need.

    "steps" that were seen of the jobs have what is looked for.
    """
    source, jobs, requests, stale = work
    runner = runner_of(llm)
    graphs, hosted = capture(runner, requests), runner.speculator.branches
    prepare, steps = hosted.prepare, []

    def prepared(batch, *args):
        steps.append(bool(looked_for(hosted, batch)))
        return prepare(batch, *args)

    with mock.patch.object(hosted, "prepare", prepared):
        results, seen = hosted_branches.run(llm, source, jobs)
    seen["steps"] = sum(steps)
    replays = {size: graph.replays for size, graph in graphs.items()}
    buffers, found = hosted.buffers, {}
    for name in ("query_start_loc", "seq_lens") if stale else ():
        hosted.buffers = copy.copy(buffers)
        setattr(hosted.buffers, name, getattr(buffers, name).clone())
        found[name], _ = hosted_branches.run(llm, source, stale)
    if stale:
        hosted.buffers, hosted.tables = buffers, [each.clone() for each in hosted.tables]
        found["block tables"], _ = hosted_branches.run(llm, source, stale)
    return results, seen, replays, found


def engine(family, rows: int, **keys) -> dict:
    levels = [{"sources": [{"ngram": {"max": 3}}, {"ngram": {"max": 1}}], "branches": rows}]
    hsd = {"method": "hsd", "num_speculative_tokens": 3, "levels": levels, **keys}
    return {"model": family.target, **BASE, "speculative_config": hsd}


def test_replayed_steps_give_the_text_of_no_speculation(family, greedy_tokens):
    """And not with a buffer that captured kernels read but that is not refreshed."""
    known = [p + tokens for p, tokens in zip(engines.PROMPTS, greedy_tokens, strict=True)]
    short = {**engines.GREEDY, "max_tokens": 4}
    stale = {"two": {"prompts": engines.PROMPTS[2:], "params": short}}
    work = Oracle(known, 64, seed=1), {"joining": engines.JOBS["joining"]}, [1, 4], stale
    arguments = engine(family, rows=2)
    results, seen, replays, without = engines.run_engine(arguments, work, work=in_graphs)
    assert ids(results["joining"]) == greedy_tokens
    assert seen["won"] > 3
    assert min(replays.values()), replays
    for name, result in without.items():
        assert ids(result["two"]) != [tokens[:4] for tokens in greedy_tokens[2:]], name


def test_prompts_as_long_as_rows_are_read_whole():
    """A row of an image's prompt would not see what of the image goes on in the next."""
    rows = {"length_of": lambda batch: 3, "largest": 4, "length": 3, "most": 2}
    hosted = SimpleNamespace(runner=SimpleNamespace(max_num_reqs=8), **rows)
    batch = SimpleNamespace(
        num_scheduled_tokens=np.array([8]),
        num_draft_tokens_per_req=None,
        num_reqs=1,
        num_reqs_after_padding=1,
        decode_graph_eligible=False,
    )
    tables = (torch.zeros(1),)
    assert HostedBranches.prepare(hosted, batch, tables, ()) is tables


def in_graphs_of_drawn_drafts(llm, jobs: dict):
    """The jobs with drafts of a model, and how often each graph was replayed."""
    graphs = capture(runner_of(llm), [1, 2])
    results, seen = drawn_branches.run(llm, (jobs, None))
    return results, seen, {size: graph.replays for size, graph in graphs.items()}


def test_replayed_steps_of_drawn_drafts(family, greedy_tokens):
    """Greedy requests, alone and next to sampled ones, whose rows are verified together."""
    given = engine(family, rows=3, levels=[{"model": family.mid, "branches": 3}])
    found = engines.run_engine(given, engines.JOBS, work=in_graphs_of_drawn_drafts)
    results, seen, replays = found
    assert ids(results["joining"]) == greedy_tokens
    assert ids(results["mixed"])[0] == greedy_tokens[0]
    assert seen["won"] > 3 and min(replays.values()), replays


def in_graphs_with_prompts(llm, work):
    """As `in_graphs`, of steps with prompts that are replayed, and the caches after a prompt."""
    source, jobs, prompt = work

    def has_prompt(hosted, batch) -> bool:
        return hosted.length_of(batch) and batch.is_prefilling_np.any()

    results, seen, replays, _ = in_graphs(llm, (source, jobs, [1, 3, 4], {}), has_prompt)
    return results, seen, replays, hosted_branches.difference_of_caches(llm, source, prompt, 40)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_replayed_steps_of_all_kinds(family):
    """Requests with one row, prompts that vLLM pads to decodes, more rows than attention has room.

    Lists that end at max_model_len run without graphs, and so do four requests with three rows.
    """
    greedy = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    prompts = [random.Random(i).choices(range(2, 62), k=6 + 9 * i) for i in range(4)]
    jobs = {
        "joining": {"prompts": prompts, "params": greedy, "arrive": [0, 2, 3, 5]},
        "processed": {
            "prompts": prompts[:3],
            "params": [{**greedy, "presence_penalty": 0.5}, {**greedy, "logprobs": 2}, greedy],
        },
        # All but one token is in the cache.
        "again": {"prompts": [prompts[3]] * 2, "params": greedy, "arrive": [0, 6]},
        "to the end": {"prompts": [[(j * j) % 60 + 2 for j in range(130)]], "params": greedy},
    }
    plain = engines.run_engine({"model": family.target, **PLAIN}, jobs)
    work = Oracle(texts(jobs, plain), 64, seed=1), jobs, prompts[2]
    found = engines.run_engine(engine(family, rows=3), work, work=in_graphs_with_prompts)
    results, seen, replays, (difference, won) = found
    for name, result in plain.items():
        assert ids(results[name]) == ids(result), name
    assert set(replays) == {(12, 1), (12, 3)} and min(replays.values()) > 3
    assert seen["won"] > 20 and seen["cut"] > 0 < seen["steps"]
    assert difference == 0 and won > 2


class RightAtTheEnd(Oracle):
    """Near max_model_len the chains are right: more of them is kept than a shorter row holds."""

    def chain(self, text: list[int], most: int) -> list[int] | None:
        known = next((each for each in self.texts if each[: len(text)] == text), [])
        return known[len(text) :][:most] if len(text) > 140 else super().chain(text, most)


def in_graphs_by_turns(llm, work):
    """Draft lengths that take turns; of steps whose lists were cut to those of another length."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    lengths = itertools.cycle([7, 3, 7, 1, 7, 0])
    scheduler.dynamic_sd_lookup.learned.choose = lambda size: next(lengths)

    def has_another_length(hosted, batch) -> bool:
        return hosted.length_of(batch) not in (None, hosted.length)

    return in_graphs(llm, work, has_another_length)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_rows_of_all_lengths_that_adaptive_chooses_from(family):
    greedy = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    long = [[(j * j + i) % 60 + 2 for j in range(130 + i)] for i in range(4)]
    jobs = {
        "joining": {**engines.JOBS["joining"], "params": {**greedy, "max_tokens": 20}},
        # One after the other, so that all lists of a step are cut alike.
        "to the end": {"prompts": long, "params": greedy, "arrive": [0, 40, 80, 120]},
    }
    plain = engines.run_engine({"model": family.target, **PLAIN}, jobs)
    given = engine(family, rows=2, num_speculative_tokens=7, adaptive=True)
    work = RightAtTheEnd(texts(jobs, plain), 64, seed=1), jobs, [1, 4], {}
    results, seen, replays, _ = engines.run_engine(given, work, work=in_graphs_by_turns)
    for name, result in plain.items():
        assert ids(results[name]) == ids(result), name
    assert seen["won"] > 10 and seen["steps"] > 0
    # Lists of two rows of seven tokens, of three or of one, and their roots.
    for tokens in (16, 8, 4):
        assert sum(n for (each, _), n in replays.items() if each == tokens), replays


def test_graphs_of_batches_without_room_are_left_out(caplog):
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    from vllm_hsd.host.graphs import limit_batches

    whole, parts = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
    full = [
        BatchExecutionDescriptor(whole, tokens, tokens // each, each)
        for tokens, each in ((16, 8), (16, 1), (8, 8))
    ]
    piecewise = [BatchExecutionDescriptor(parts, 16, None, None)]
    descs = {whole: [*full], parts: [*piecewise]}
    candidates = {(16, 0): [*full[:2], *piecewise], (8, 0): [full[2]]}
    manager = SimpleNamespace(_capture_descs=descs, _candidates=candidates, max_num_reqs=3)
    limit_batches(manager, 8, 1)
    assert manager._capture_descs == {whole: full[1:], parts: piecewise}
    assert manager._candidates == {(16, 0): [full[1], *piecewise], (8, 0): [full[2]]}
    assert "batches of [1], not of [2]: attention has room for max_num_seqs=3 rows" in caplog.text
    caplog.clear()
    limit_batches(manager, 8, 1)
    assert not caplog.text
