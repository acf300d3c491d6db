"""That the program can be captured in a CUDA graph, without a GPU.

It runs on fake tensors, which have shapes but no values: whatever reads a value on the host, or has
a shape or a branch that depends on one, raises. Kernel launches are recorded, not run.
"""

from functools import partial

import pytest
import torch
from support.proposal_states import MAX_MODEL_LEN, MAX_NUM_REQS, TableLevel, schedule_of
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from triton.runtime.jit import JITFunction

from vllm_hsd.core.text_order import OrderedTexts
from vllm_hsd.runner_v2 import cascade_steps, lookups
from vllm_hsd.runner_v2.program import Program, ProgramSources
from vllm_hsd.runner_v2.proposal_state import KVGroups, ProposalState
from vllm_hsd.runner_v2.sources import Estimates, SourcesLookup
from vllm_hsd.runner_v2.suffix_lookup import SuffixLookup

pytestmark = pytest.mark.compiled

VOCABULARY, BATCH = 64, 4
# Kernels that read the requests' texts where the runner keeps them.
SEARCHES = {
    "find_ngram_kernel",
    "copy_ngram_kernel",
    "match_text_kernel",
    "own_votes_kernel",
    "store_votes_kernel",
    "judge_offers_kernel",
}


class TinyModel(TableLevel):
    """`after` sees its logits."""

    def __init__(self, after=lambda logits: logits) -> None:
        super().__init__(torch.randn(VOCABULARY, VOCABULARY, dtype=torch.bfloat16))
        self.after = after

    def forward(self, state, op, num_logits):
        return self.after(super().forward(state, op, num_logits))


@pytest.fixture
def launches(monkeypatch):
    """Names and tensors of the kernels that were launched."""
    recorded = []

    def run(self, *args, grid, warmup, **kwargs):
        assert all(isinstance(n, int) for n in grid)
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        numbers = [a for a in (*args, *kwargs.values()) if not isinstance(a, torch.Tensor)]
        assert all(isinstance(n, int | bool) for n in numbers)
        recorded.append((self.fn.__name__, tensors))

    monkeypatch.setattr(JITFunction, "run", run)
    return recorded


def run_on_fake_tensors(lengths, levels, lookup=False, verifier="block", chooses=False):
    """Stage and run; (schedule, tensors of the runner)."""
    schedule = schedule_of(*lengths, lookup=lookup, chooses=chooses)
    models = [torch.bfloat16] * len(lengths)
    state = ProposalState.allocate(
        schedule,
        batch=8,
        max_num_reqs=MAX_NUM_REQS,
        vocab_size=VOCABULARY,
        dtypes=[None, *models[1:]] if lookup else models,
        num_kv_groups=2,
        device=torch.device("cpu"),
    ).bucket(BATCH)
    text = torch.zeros(MAX_NUM_REQS, MAX_MODEL_LEN, dtype=torch.int32)
    runner = {
        "index": torch.zeros(3, dtype=torch.int32),
        "text": text,
        "length": torch.zeros(MAX_NUM_REQS, dtype=torch.int32),
        "num_sampled": torch.zeros(3, dtype=torch.int32),
        "temperature": torch.zeros(MAX_NUM_REQS),
        "top_k": torch.zeros(MAX_NUM_REQS, dtype=torch.int32),
        "top_p": torch.zeros(MAX_NUM_REQS),
        "min_p": torch.zeros(MAX_NUM_REQS),
        "seeds": torch.zeros(MAX_NUM_REQS, dtype=torch.int64),
        "scales": torch.zeros(len(lengths)),
    }
    groups = KVGroups(
        torch.zeros(2, dtype=torch.uint64),
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.int32),
    )
    texts = OrderedTexts(torch.zeros(9, dtype=torch.int32), torch.zeros(7, dtype=torch.int32))
    successor = torch.zeros(VOCABULARY, dtype=torch.int32)
    curve = torch.ones(lengths[0], dtype=torch.float64)
    searches = [
        (partial(lookups.lookup_ngram, shortest=1, longest=4), Estimates(curve, False)),
        (SuffixLookup(texts, 0.05, text.device), None),
    ]
    sources = SourcesLookup(searches, 0.05, MAX_NUM_REQS, lengths[0], text.device, chooses)
    offer = partial(sources.offer, text=text)
    joined = ProgramSources(offer, sources.choose, sources.drawn) if chooses else None
    below = {
        "ngram": partial(lookups.lookup_ngram, text=text, shortest=1, longest=4),
        "suffix": partial(SuffixLookup(texts, 0.05, text.device), text=text),
        "sources": partial(sources, text=text),
        "bigram": partial(lookups.lookup_bigram, successor=successor),
    }
    built = [below[level] if isinstance(level, str) else level() for level in levels]
    cascade_steps.stage(state, schedule, **runner, max_model_len=MAX_MODEL_LEN)
    verifiers = [verifier] * len(lengths)
    program = Program(schedule, built, verifiers, groups, MAX_MODEL_LEN, sources=joined)
    program.run(state)
    return schedule, runner


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize(
    ("lengths", "levels"),
    [
        ((4,), [TinyModel]),
        ((3, 8), [TinyModel] * 2),
        ((1, 3, 7), [TinyModel] * 3),
        ((3, 8), ["ngram", TinyModel]),
        ((3, 8), ["bigram", TinyModel]),
        ((3, 8), ["suffix", TinyModel]),
        ((3, 8), ["sources", TinyModel]),
    ],
)
def test_nothing_is_read_on_the_host(lengths, levels, chooses, launches):
    """Also that no kernel but stage's reads the runner's tensors, but for the searched text."""
    lookup = isinstance(levels[0], str)
    if chooses and lookup:
        pytest.skip("it has no model next to lookups")
    with FakeTensorMode():
        schedule, runner = run_on_fake_tensors(lengths, levels, lookup, chooses=chooses)
    names = [name for name, _ in launches]
    assert names[0] == "stage_kernel" and names[-1] == "collect_kernel"
    passes = sum(schedule.num_logits(op) > 0 for op in schedule.ops)
    assert names.count("place_kernel") == passes
    assert names.count("verify_kernel") == 2 * names.count("commit_verify_kernel")
    runners = {tensor.untyped_storage()._cdata for tensor in runner.values()}
    searched = runner["text"].untyped_storage()._cdata
    for name, tensors in launches[1:]:
        read = {tensor.untyped_storage()._cdata for tensor in tensors} & runners
        assert read <= ({searched} if name in SEARCHES else set()), name


def test_a_level_that_passes_drafts_on_reads_nothing_on_the_host(launches):
    with FakeTensorMode():
        run_on_fake_tensors((3, 8), [TinyModel, TinyModel], verifier="none")
    names = [name for name, _ in launches]
    assert "commit_unverified_kernel" in names and "verify_kernel" not in names


def _item(logits):
    return logits * logits.sum().item()


def _branch(logits):
    return -logits if logits.amax() > 0 else logits


def _shape(logits):
    return logits[logits.amax(-1) > 0]


@pytest.mark.parametrize("fault", [_item, _branch, _shape])
def test_a_host_read_is_caught(fault, launches):
    depends_on_data = (DataDependentOutputException, DynamicOutputShapeException)
    with FakeTensorMode(), pytest.raises(depends_on_data):
        run_on_fake_tensors((3, 8), [TinyModel, lambda: TinyModel(fault)])
