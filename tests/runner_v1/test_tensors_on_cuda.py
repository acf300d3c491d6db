"""The V1 runner's part on an emulated device: one explicit copy wherever host and device meet.

Every case runs on the CPU and on the device of `support.emulated_device`, with equal results.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.emulated_device import CUDA, Marked, emulated
from vllm import _custom_ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hsd.core.bigram import BigramLevel
from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.levels import UNLIMITED, DraftBatch, LevelOptions
from vllm_hsd.core.ngram_model import NgramModelLevel
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.core.text_store import collect_texts
from vllm_hsd.runner_v1.levels import ModelLevel
from vllm_hsd.runner_v1.sampler import drafts_to_verify
from vllm_hsd.runner_v1.sampling import RequestSampling
from vllm_hsd.runner_v1.stock_drafters import StockDraftSampler
from vllm_hsd.verify.chain import verify_batch

V, BATCH, LENGTH = 7, 3, 4
RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, V, 40) for _ in range(3)]
TABLE = RNG.normal(size=(V, V)).astype(np.float32)


class OnDevice:
    """A model whose logits are a row of a table on the device."""

    keeps_cache, context_length = True, UNLIMITED

    def __init__(self, device: torch.device) -> None:
        self.table = torch.from_numpy(TABLE).to(device)

    def forward(self, tokens, rows, starts, counts, num_logits):
        last = [
            tokens[row, start + count - kept : start + count]
            for row, start, count, kept in zip(rows, starts, counts, num_logits, strict=True)
        ]
        index = torch.from_numpy(np.concatenate(last).astype(np.int64))
        return self.table[index.to(self.table.device)] if len(index) else None


def metadata(device: torch.device, greedy: bool, processors=(), **others) -> SamplingMetadata:
    def of_requests(*values):
        return torch.tensor(values, device=device)

    allowed = torch.zeros(BATCH, V, dtype=torch.bool, device=device)
    allowed[0, 2] = True
    keys = dict(
        temperature=None if greedy else of_requests(0.0, 0.7, 1.3),
        all_greedy=greedy,
        all_random=False,
        top_p=of_requests(1.0, 0.9, 0.8),
        top_k=of_requests(V, 5, 6),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=of_requests(0.0, 0.3, 0.0),
        presence_penalties=of_requests(0.2, 0.0, 0.0),
        repetition_penalties=of_requests(1.0, 1.2, 1.0),
        output_token_ids=[[1, 2], [3], [4, 5, 6]],
        spec_token_ids=[[] for _ in range(BATCH)],
        allowed_token_ids_mask=allowed,
        bad_words_token_ids={1: [[3, 4]]},
        logitsprocs=LogitsProcessors(processors),
    )
    return SamplingMetadata(**{**keys, **others})


def filters(device: torch.device) -> list:
    """Built-in processors of three requests as the runner fills them."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=BATCH),
        model_config=SimpleNamespace(get_vocab_size=lambda: V),
        parallel_config=SimpleNamespace(use_ubatching=False),
    )
    min_p = MinPLogitsProcessor(config, torch.device("cpu"), False)
    min_p.min_p_cpu[:] = [0.0, 0.05, 0.1]
    min_p.min_p_count = 2
    bias = LogitBiasLogitsProcessor(config, device, False)
    bias.biases = {2: {1: 0.5, 4: -1.0}}
    return [min_p, bias]


def everywhere(run):
    """(on the CPU, on the emulated device) of a function of the device."""
    plain = run(torch.device("cpu"))
    with emulated():
        return plain, run(CUDA)


def lowest(kind: str, device: torch.device):
    if kind == "bigram":
        return BigramLevel(collect_texts(TEXTS, V))
    if kind == "ngram_model":
        return NgramModelLevel(collect_texts(TEXTS, V), 3, device)
    return OnDevice(device)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("stopping", ["fixed", "entropy"])
@pytest.mark.parametrize(
    "kinds", [("model",), ("bigram", "model"), ("model", "ngram_model"), ("ngram_model", "model")]
)
def test_cascades_draft_and_are_verified(kinds, stopping, greedy):
    def draft(device: torch.device):
        levels = [lowest(kind, device) for kind in kinds]
        lengths = [2, LENGTH][-len(levels) :]
        options = [LevelOptions(length, stopping=stopping) for length in lengths]
        cascade = Cascade(levels, options, BATCH)
        for drafts in cascade.drafts:
            drafts.allocate(V, torch.float32, device)
        given = metadata(device, greedy, filters(device))
        sampling = RequestSampling(given, [1.0, 0.8])
        tokens = np.zeros((BATCH, 64), dtype=np.int32)
        for row, text in enumerate(TEXTS):
            tokens[row, :40] = text
        rng = np.random.default_rng(1)
        slots = np.arange(BATCH)
        thresholds = EntropyThresholds.fresh(len(levels), BATCH)
        thresholds.observe_rejection(0, slots, np.full(BATCH, 1.5))
        batch = DraftBatch(
            tokens=tokens,
            rows=slots,
            end=np.full(BATCH, 20),
            cached=np.zeros((len(levels), BATCH), dtype=np.int64),
            eos=np.full(BATCH, -1),
            greedy=False,
            probs=sampling.draft_probabilities,
            uniforms=lambda slots, counts, level: rng.random(int(counts.sum())),
            thresholds=thresholds,
        )
        drafts = cascade.propose(batch, slots, np.full(BATCH, LENGTH))
        counts = drafts.counts[slots]
        logits = torch.from_numpy(RNG_ROWS[: int(counts.sum()) + BATCH]).to(device)
        scheduled = np.where(np.arange(LENGTH) < counts[:, None], drafts.token_ids[slots], -1)
        processed = sampling.target_logits(logits, counts, scheduled)
        owners = np.repeat(slots, counts + 1)
        probs, ok = sampling.target_probabilities(processed, owners)
        chain, scored = drafts_to_verify(drafts, slots, scheduled, counts, probs)
        uniforms = rng.random(int((chain.lengths + 1).sum()))
        emitted, accepted = verify_batch(chain, "block", uniforms, target_ok=ok)
        assert device.type == "cpu" or isinstance(probs, Marked)
        return (
            drafts.token_ids[slots].tolist(),
            emitted.tolist(),
            accepted.tolist(),
            scored.tolist(),
        )

    plain, device = everywhere(draft)
    assert plain == device


RNG_ROWS = RNG.normal(size=(BATCH * (LENGTH + 1), V)).astype(np.float32)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("penalties", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_stock_drafts_are_verified(monkeypatch, greedy, penalties, drawn):
    if penalties:
        torch_op = _custom_ops.apply_repetition_penalties_torch
        monkeypatch.setattr(_custom_ops, "apply_repetition_penalties", torch_op)

    def verify(device: torch.device):
        torch.manual_seed(3)
        counts = [2, 0, 3]
        rows = sum(counts) + BATCH
        given = metadata(
            device,
            greedy,
            filters(device),
            max_num_logprobs=2,
            no_penalties=not penalties,
            prompt_token_ids=torch.tensor([[1, 2], [3, V], [0, 1]], device=device),
        )
        drafts = SpecDecodeMetadata.make_dummy([[1, 2], [], [3, 4, 5]], device)
        draft_probs = torch.full((sum(counts), V), 1 / V).to(device) if drawn else None
        logits = torch.from_numpy(RNG_ROWS[:rows]).to(device)
        found = StockDraftSampler(Sampler())(drafts, draft_probs, logits, given)
        assert device.type == "cpu" or isinstance(found.sampled_token_ids, Marked)
        return found.sampled_token_ids.tolist(), found.logprobs_tensors.logprobs.tolist()

    plain, device = everywhere(verify)
    assert plain == device


HOST_FIELDS = {"query_start_loc_cpu", "seq_lens_cpu_upper_bound", "is_prefilling"}


def test_attention_metadata_of_a_level_is_where_builders_expect_it(monkeypatch):
    """On the device, but for the fields that vLLM's builders read on the host."""
    seen: list[CommonAttentionMetadata] = []

    def forward(device: torch.device):
        level = object.__new__(ModelLevel)
        table = SimpleNamespace(
            block_table=SimpleNamespace(np=np.arange(BATCH * 4, dtype=np.int32).reshape(BATCH, 4)),
            block_size=16,
        )
        level.runner = SimpleNamespace(input_batch=SimpleNamespace(block_table=[table]))
        level.device, level.vllm_config = device, None
        level.vocab_size = level.target_vocab_size = V
        level.max_tokens = 64
        embedding = torch.from_numpy(TABLE).to(device)
        level.model = lambda input_ids, positions: embedding[input_ids] + positions[:, None]
        level.logits = lambda hidden: hidden
        level.attention_groups = [
            SimpleNamespace(
                kv_cache_group_id=0,
                layer_names=["a"],
                build_metadata_for_drafting=lambda common, draft_index: seen.append(common),
            )
        ]
        tokens = np.stack([text[:40] for text in TEXTS]).astype(np.int32)
        counts, logits = np.array([3, 1, 5]), np.array([2, 0, 3])
        return level.forward(tokens, np.arange(BATCH), np.array([4, 9, 0]), counts, logits).tolist()

    monkeypatch.setattr(
        "vllm_hsd.runner_v1.levels.set_forward_context",
        lambda *args, **kwargs: contextlib.nullcontext(),
    )
    plain, device = everywhere(forward)
    assert plain == device
    tensors = {k: v for k, v in vars(seen[-1]).items() if isinstance(v, torch.Tensor)}
    assert {name for name, value in tensors.items() if not isinstance(value, Marked)} == HOST_FIELDS
    assert tensors.keys() > HOST_FIELDS


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows: rows + torch.ones(V),
        lambda rows: rows.numpy(),
        lambda rows: torch.ones(V)[rows.argmax(-1)],
    ],
)
def test_the_emulated_device_refuses_what_cuda_does(wrong):
    with emulated(), pytest.raises((RuntimeError, TypeError)):
        wrong(torch.zeros(2, V, device=CUDA))
