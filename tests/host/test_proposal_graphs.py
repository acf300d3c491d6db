"""Proposals as CUDA graphs, recorded and replayed on a CPU (see support.recorded_graph)."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import recorded_graph
from support.marks import slow
from support.recorded_graph import RecordedGraph
from support.table_drafters import cascade, table, tables
from support.table_runner import TableRunner
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention.mla_attention import QueryLenSupport
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils

from benchmarks.gpu.graph_checks import GraphError, watch
from vllm_hsd.budget.trials import Trials
from vllm_hsd.cascade.counters import Count
from vllm_hsd.config.sizes import max_batch_size
from vllm_hsd.errors import UserError
from vllm_hsd.host import base_speculator, program_models
from vllm_hsd.host.branches import HostedBranches
from vllm_hsd.host.graphs import ProposalGraphs, batch_sizes

pytestmark = pytest.mark.usefixtures("as_on_gpus")

PARAMS = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 1}, {"temperature": 0.7, "top_p": 0.8}]


def runner(params=PARAMS, levels: int = 2, length: int = 3, adapts: bool = False, **keys):
    target, draft = tables()
    middle = {"model": target + 0.4 * table(2, len(target), 1.0)}
    lowest = [{"model": draft, "num_tokens": 1}, {"ngram": {"max": 2}, "num_tokens": 1}][levels - 2]
    cascade = {"num_speculative_tokens": length, "levels": [lowest, middle], **keys}
    options = {"length": length, "prompt_length": 4, "adapts": adapts}
    return TableRunner(target, draft, params, **options, cascade=cascade)


@pytest.fixture
def captured(monkeypatch):
    """Gives a runner's cascade graphs for at most 4 requests."""
    recorded_graph.install(monkeypatch.setattr)
    first = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: first)
    monkeypatch.setattr(cudagraph_utils, "is_global_first_rank", lambda: False)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4]),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )

    def capture(served, sizes=(2, 3)):
        proposals = list(served.drafter.programs)
        served.drafter.graphs = ProposalGraphs(config, torch.device("cpu"), sizes, proposals)
        served.drafter.capture()
        return served

    return capture


def draft_alike(plain, graphed, steps: int) -> None:
    """Both draft the same, step after step."""
    for _ in range(steps):
        plain.step()
        graphed.step()
        assert graphed.drafted.equal(plain.drafted)
    assert graphed.texts() == plain.texts()


@pytest.mark.parametrize(
    ("levels", "sizes", "replays"),
    [
        (2, (2, 4), [2, 0]),  # the largest is first
        (3, (2, 4), [2, 0]),
        pytest.param(2, (1, 2), [0, 0], marks=pytest.mark.slow),
    ],
    ids=["two models", "a lookup below", "above the largest graph"],
)
def test_a_graph_drafts_what_the_program_drafts(captured, levels, sizes, replays):
    """Captured once with nothing but padding; the texts grow, and a request is padding.

    The checks find nothing: only `stage` reads what the runner hands over.
    """
    plain, graphed = runner(levels=levels), captured(runner(levels=levels), sizes)
    watch(graphed.drafter)
    draft_alike(plain, graphed, 2)
    assert [graph.replays for graph in RecordedGraph.made] == replays
    assert graphed.drafter.state.counts.equal(plain.drafter.state.counts)


def test_a_graph_measures_the_confidences_that_the_program_measures(captured):
    plain, graphed = runner(adapts=True), captured(runner(adapts=True), sizes=(2, 4))
    watch(graphed.drafter)
    for _ in range(2):
        draft_alike(plain, graphed, 1)
        found = graphed.drafter.draft_token_confidence_probs
        assert found.equal(plain.drafter.draft_token_confidence_probs) and len(found.unique()) > 2


def test_a_dummy_step_that_vllm_times_is_a_proposal(captured):
    """Its manager of adaptive verification weighs what drafting costs."""
    graphed = captured(runner(adapts=True), sizes=(2, 4))
    batch = SimpleNamespace(num_reqs=3)
    graphed.drafter.propose(batch, {}, {}, None, None, None, None, dummy_run=True)
    assert [graph.replays for graph in RecordedGraph.made] == [1, 0]
    assert not graphed.drafter.state.counts.any()


def test_every_draft_length_has_its_graphs(captured):
    """As the scheduler chooses them; a length of vLLM's warm-up takes the longest program."""
    adaptive = {"length": 4, "adaptive": True}
    plain, graphed = runner(**adaptive), captured(runner(**adaptive), sizes=(4,))
    watch(graphed.drafter)
    passes = []
    for asked in (2, 4, 2, 3):
        for served in (plain, graphed):
            served.drafter.asked = asked
            served.step()
        passes.append(sum(plain.drafter.counts.take().rows[:, Count.forwards]))
        assert graphed.drafted.equal(plain.drafted) and graphed.drafted.shape[1] == asked
    assert graphed.texts() == plain.texts()
    assert [graph.replays for graph in RecordedGraph.made] == [2, 2]
    assert passes[0] == passes[2] < passes[1] == passes[3]


@pytest.mark.parametrize("checks", [False, *slow(True)])
def test_passes_that_no_request_wants_are_skipped(checks, captured):
    """A model next to a lookup, which wins as long as the text repeats itself.

    A whole draft is wanted in the steps 0 to 3, and in 9 and 10, after the text has changed; three
    steps later its passes run.
    """
    target, other = table(0, 6, 1.3), table(5, 6, 1.3)
    levels = [{"sources": [{"ngram": {"max": 2}}, {"model": other}]}]
    options = {"length": 3, "prompt_length": 4}
    given = {"num_speculative_tokens": 3, "levels": levels}
    plain, graphed = (
        TableRunner(target, other, [{"temperature": 0.0}], **options, cascade=given)
        for _ in range(2)
    )
    captured(graphed, sizes=(2,))
    if checks:
        watch(graphed.drafter)
    passes, wanted = [], []
    for served in (plain, graphed):
        served.drafter.further.trials = Trials(1, steps=1)
    for step in range(14):
        if step == 9:
            plain.target = graphed.target = other
            repeated = len(plain.texts()[0])
        draft_alike(plain, graphed, 1)
        passes.append(plain.drafter.counts.take().rows[0, Count.forwards])
        wanted.append(int(plain.drafter.lookup.wanted))
    assert np.flatnonzero(np.diff(wanted, prepend=0)).tolist() == [0, 1, 2, 3, 9, 10]
    assert passes == [3, 1, 1, 3, 3, 3, 3, 1, 1, 1, 1, 1, 3, 3]
    assert [graph.replays for graph in RecordedGraph.made] == [7, 7]
    [text] = plain.texts()
    for at in range(4, len(text)):
        assert text[at] == int((target if at < repeated else other)[text[at - 1]].argmax())
    assert graphed.drafter.lookup.shared.equal(plain.drafter.lookup.shared)
    assert plain.accepted == graphed.accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["entropy", "horizontal lookup", "pairs", "sources", "unverified"])
def test_graphs_of_other_cascades(captured, name):
    """A replay after a check without the graph begins with the thresholds of before."""

    def runner():
        options = {"length": 4, "prompt_length": 5, "cascade": cascade(name)}
        return TableRunner(*tables(), PARAMS, **options)

    plain, graphed = runner(), captured(runner(), sizes=(4,))
    watch(graphed.drafter)
    draft_alike(plain, graphed, 3)
    if name == "entropy":
        thresholds = graphed.drafter.thresholds
        assert thresholds.count.equal(plain.drafter.thresholds.count)
        assert (thresholds.count.sum(1) > 0).all()


def change_logits(served, change) -> None:
    """Of level 1."""
    level = served.drafter.program.levels[1].runs
    forward = level.forward
    level.forward = lambda *args: change(forward(*args))


@pytest.mark.parametrize(
    ("of", "named"),
    [
        (lambda served: served.drafter.parameters.temperature[0], "temperature"),
        (lambda served: served.sampler.sampling_states.top_k.gpu[0], "top_k"),
        (lambda served: served.states.total_len.gpu[0], "the table of requests.total_len"),
        (lambda served: served.slots[0], "the batch.idx_mapping"),
    ],
)
def test_a_read_after_stage_is_caught(of, named):
    """Of a tensor that the runner hands over anew for each proposal."""
    served = runner()
    watch(served.drafter)
    change_logits(served, lambda logits: logits + 0 * of(served))
    with pytest.raises(GraphError, match=f"reads {named} of the runner"):
        served.step()


def test_a_kernel_that_reads_after_stage_is_caught():
    """Launches pass torch's dispatcher by."""
    served = runner()
    watch(served.drafter)
    state = served.drafter.state
    bucket = state.bucket

    def seeds_of_the_runner(batch):
        cut = bucket(batch)
        cut.seeds = served.sampler.sampling_states.seeds.gpu[:batch]
        return cut

    state.bucket = seeds_of_the_runner
    with pytest.raises(GraphError, match="kernel reads seeds of the runner"):
        served.step()


def test_a_graph_with_an_old_address_is_caught(captured):
    """A table moves after the capture: the program follows it, the graph does not."""
    served = captured(runner([{"temperature": 0.0}] * 3), sizes=(4,))
    watch(served.drafter)
    served.drafter.program.levels[1].runs.logits = -served.target
    with pytest.raises(GraphError, match="the CUDA graph for 4 requests drafts"):
        served.step()


def test_a_host_read_while_captured_is_caught(captured):
    served = runner()
    change_logits(served, lambda logits: logits * served.target[0, 0].item())
    with pytest.raises(RuntimeError, match="read on the host while a CUDA graph"):
        captured(served)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [(1, [1]), (8, [1, 2, 4, 8]), (11, [1, 2, 4, 8, 11]), (64, [1, 2, 4, 8, 16, 24, 32, 48, 64])],
)
def test_the_largest_batch_that_drafts_is_captured(largest, sizes):
    assert batch_sizes(largest) == sizes


def test_no_proposal_feeds_more_than_torch_compile_covers():
    hsd = SimpleNamespace(disable_by_batch_size=64, adaptive=False)
    for longest, tokens, expected in ((0, 8, 64), (5, 8192, 64), (5, 256, 51), (10, 10, 1)):
        assert max_batch_size(hsd, longest, tokens) == expected
    with pytest.raises(UserError, match="max_num_batched_tokens is 9"):
        max_batch_size(hsd, 10, 9)


def test_attention_captures_as_many_tokens_as_proposals_feed(monkeypatch):
    """vLLM's bound is that of the target's batches, and stays. Contexts are as long as its."""
    given = []
    monkeypatch.setattr(
        program_models, "init_attn_backend", lambda *args, **_: (given.append(args), 0, 0)
    )
    compilation = SimpleNamespace(max_cudagraph_capture_size=512, static_forward_context={})
    speculator = SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=compilation, model_config=SimpleNamespace(max_model_len=64)
        ),
        vocab_size=7,
        device=None,
        state=SimpleNamespace(batch=64),
        schedule=SimpleNamespace(longest_query=10),
    )
    made = program_models.ProgramModel(speculator, 0)
    made.layer_names, shorter = set(), SimpleNamespace(max_model_len=32)
    made.draft_config = SimpleNamespace(compilation_config=compilation, model_config=shorter)
    made.init_attention(None)
    used = given[0][1].compilation_config
    assert given[0][1].model_config.max_model_len == 64 and shorter.max_model_len == 32
    assert used.max_cudagraph_capture_size == 640 and compilation.max_cudagraph_capture_size == 512
    assert used.static_forward_context is compilation.static_forward_context


@pytest.mark.parametrize(("own", "refused"), [(None, True), (64, False)])
def test_a_level_reads_the_cache_in_the_blocks_that_it_has(own, refused):
    """Of 128 tokens, which the target's attention backend reads by 64."""

    def group(name: str, size: int | None) -> list:
        return [SimpleNamespace(layer_names=[name], kernel_block_size=size)]

    drafter = SimpleNamespace(groups=[group("small", own)], index=1)
    target = [[*group("target", 64), *group("small", 64)]]
    raises = pytest.raises(UserError, match=r"levels\[1\] reads the KV cache in other")
    with raises if refused else nullcontext():
        base_speculator._same_blocks(drafter, target)


@pytest.mark.parametrize(
    ("support", "asynchronous", "refused"),
    [
        ("UNIFORM", True, True),
        ("UNIFORM", False, False),
        ("VARLEN", True, False),
        (None, True, False),
    ],
)
def test_branches_want_attention_of_rows_of_any_length(support, asynchronous, refused):
    """MLA takes other rows for prompts, by the host's bound on their lengths."""
    support = support and QueryLenSupport[support]
    builder = SimpleNamespace(query_len_support=support)
    backend = SimpleNamespace(get_name=lambda: "SOME_MLA")
    group = SimpleNamespace(get_metadata_builder=lambda: builder, backend=backend)
    scheduler = SimpleNamespace(async_scheduling=asynchronous)
    config = SimpleNamespace(scheduler_config=scheduler, cache_config=SimpleNamespace())
    hosted = HostedBranches.__new__(HostedBranches)
    hosted.runner = SimpleNamespace(attn_groups=[[group]], vllm_config=config)
    # What comes next needs more of a configuration.
    expected = UserError if refused else AttributeError
    with pytest.raises(expected, match="SOME_MLA" if refused else "num_gpu_blocks"):
        hosted.set_attn(SimpleNamespace(kv_cache_groups=[]))


def test_nothing_is_learned_of_drafts_that_are_dropped(captured, monkeypatch):
    """In steps without drafts a model next to lookups only reads; it is the target itself."""
    target = table(0, 6, 1.3)
    sources = {"sources": [{"ngram": {"max": 2}}, {"model": target}]}
    given = {"num_speculative_tokens": 4, "adaptive": True, "levels": [sources]}
    params, sizes = [{"temperature": 1.0}] * 3, {"length": 4, "prompt_length": 4}
    served = TableRunner(target, target, params, **sizes, cascade=given)
    drafter = served.drafter
    monkeypatch.setattr(type(drafter), "keeps_caches", property(lambda self: True))
    captured(served, (4,))
    for _ in range(6):
        drafter.asked = 0
        served.step()
    assert sum(graph.replays for graph in RecordedGraph.made) == 6
    assert not drafter.lookup.shared[:, -1].any()


def level(supports: bool = True, support: str = "UNIFORM_BATCH") -> SimpleNamespace:
    """A level with one attention backend."""
    builder = SimpleNamespace(get_cudagraph_support=lambda *args: AttentionCGSupport[support])
    group = SimpleNamespace(
        backend=SimpleNamespace(get_name=lambda: "SOME_ATTENTION"),
        supports_draft_decode_metadata_update=supports,
        get_metadata_builder=lambda index: builder,
        kv_cache_spec=None,
    )
    return SimpleNamespace(groups=[[group]], vllm_config=None, enforce_eager=False)


@pytest.mark.parametrize(
    ("mode", "of", "warning"),
    [
        ("FULL_DECODE_ONLY", {}, None),
        ("FULL_AND_PIECEWISE", {}, None),
        ("NONE", {}, "without CUDA graphs: cudagraph_mode is NONE."),
        ("PIECEWISE", {}, "without CUDA graphs: cudagraph_mode is PIECEWISE."),
        ("FULL", {"supports": False}, "backend SOME_ATTENTION plans its work on the host."),
        ("FULL", {"support": "UNIFORM_SINGLE_TOKEN_DECODE"}, "SOME_ATTENTION cannot capture 3 "),
        ("FULL", {"support": "NEVER"}, "SOME_ATTENTION cannot capture 3 tokens for each request."),
    ],
)
def test_no_cascade_drafts_without_graphs_in_silence(captured, caplog, mode, of, warning):
    drafter = captured(runner(), sizes=()).drafter
    drafter.vllm_config = drafter.graphs.vllm_config
    drafter.hosted, drafter.device = [level(**of), None], torch.device("cpu")
    drafter.init_cudagraph_manager(CUDAGraphMode[mode])
    if warning is None:
        assert drafter.graphs.sizes == [1, 2, 4] and not caplog.text
    else:
        assert drafter.graphs is None and warning in caplog.text
