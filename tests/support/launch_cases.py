"""Which launches of serving are compiled: for the fast suite (`SHORT`) and for all (`ALL`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_hsd.kernels.chain_verify import METHODS
from vllm_hsd.kernels.tree_verify import MAX_NODES

from .kernel_launches import Cascade
from .verification_launches import Branches, SeveralDrafts, StockDrafter, Trees

# The fast suite's, in the shapes of Qwen3, one length for all: each launches a kernel of its own.
SHORT = (
    Cascade((8,)),
    Cascade((3, 8)),
    Cascade((3, 8), "ngram"),
    Cascade((8,), "suffix", store=1 << 24, shared=1 << 18),
    Cascade((3, 8), counted=(0,)),
    # All lookups that there are.
    Cascade((3, 8), "sources", sources=4),
    Cascade((3, 8), unsure=(0, 1), horizontal_tokens=3),
    Cascade((3, 8), head=True),
    StockDrafter(torch.bfloat16),
    Cascade((8,), "sources", rows=4),
    Branches(),
    # An odd number of tokens.
    SeveralDrafts(rows=3, length=5),
)
# Verification is compiled anew for every K, vocabulary and dtype: one of them changes at a time.
ALL = (
    *SHORT,
    Cascade((1, 3, 8)),
    *(Cascade(n, method=m) for m in METHODS for n in ((3, 8), (2, 2, 2, 8))),
    *(Cascade(n, k) for k in ("ngram", "bigram", "prediction") for n in ((8,), (1, 2, 8))),
    Cascade((3, 8), exits=(0,)),
    *(Cascade((1, 3, 8), unsure=levels) for levels in ((0,), (1,), (2,), (0, 1, 2))),
    *(Cascade((3, 8), kind, unsure=(1,), unverified=(1,)) for kind in ("model", "ngram")),
    Cascade((3, 8), unsure=(0, 1), unverified=(1,), vocab_size=50257, slots=3, capacity=3),
    *(Cascade((n,), unsure=(0,), slots=c, capacity=c) for n, c in ((8, 1), (63, 64))),
    *(Cascade((3, 8), dtype=d, unsure=(0, 1)) for d in (torch.float16, torch.float32)),
    Cascade((3, 8), unsure=(0, 1), shorter=(1, 2)),
    *(Cascade((2, 8), k, horizontal_tokens=3) for k in ("model", "ngram", "suffix", "sources")),
    Cascade((1, 3, 8), horizontal_tokens=2, unsure=(0,)),
    *(Cascade((3, 8), counted=(0,), dtype=d) for d in (torch.float16, torch.float32)),
    Cascade((8,), counted=(0,), vocab_size=50257, capacity=3, slots=3),
    Cascade((2, 3, 8), "ngram", counted=(1,), max_model_len=16),
    *(Cascade((3, 8), counted=(0,), unverified=(1,), horizontal_tokens=n) for n in (0, 2)),
    Cascade((2, 8), horizontal_tokens=2, shorter=(1, 4), vocab_size=50257),
    *(Cascade((1, 2, 8), "ngram", exits=e) for e in ((1,), (1, 2))),
    *(Cascade((3, 8), kind, unverified=(1,)) for kind in ("model", "ngram")),
    Cascade((1, 3, 8), unverified=(1, 2)),
    Cascade((3, 8), unverified=(1,), vocab_size=50257, capacity=3, slots=3),
    *(Cascade((3, 8), dtype=d, unverified=(1,)) for d in (torch.float16, torch.float32)),
    # Shorter drafts in the memory of the longest ones, as the adaptive ladder gives them.
    *(Cascade((8,), shorter=(n,)) for n in (4, 2)),
    *(Cascade((3, 8), shorter=n) for n in ((3, 4), (1, 2))),
    Cascade((1, 3, 8), shorter=(1, 2, 4)),
    Cascade((3, 8), unverified=(1,), shorter=(1, 2)),
    *(Cascade((4, 8), kind, shorter=(3, 4)) for kind in ("ngram", "bigram", "suffix", "sources")),
    *(Cascade((4, 8), "sources", sources=n) for n in (1, 2, 4, 8)),
    Cascade((8,), "sources", sources=1, chooses=True),
    Cascade((3, 8), "sources", sources=2, chooses=True),
    Cascade((3, 5)),
    Cascade((2, 4, 8), head=True, groups=3, capacity=3, slots=3, max_model_len=1000),
    Cascade((2, 8), head=True, horizontal_tokens=3),
    Cascade((3, 8), "sources", sources=2, chooses=True, head=True),
    # Views of a state for an odd number of requests are not aligned.
    *(Cascade((3, 8), capacity=c, slots=c) for c in (1, 2, 3, 33)),
    *(Cascade((3, 8), "ngram", capacity=c, slots=c, max_model_len=2048) for c in (1, 3)),
    Cascade((3, 8), groups=3),
    *(Cascade((3, 8), dtype=d) for d in (torch.float16, torch.float32)),
    *(Cascade((3, 8), vocab_size=v) for v in (32000, 50257, 262144)),
    Cascade((1, 3, 8), vocab_size=128, dtype=torch.float32, max_model_len=1000),
    # The longest drafts, and texts from a block to a million tokens.
    Cascade((15, 31, 63)),
    *(Cascade((4, 8), "ngram", max_model_len=n) for n in (16, 40960, 1 << 20)),
    *(Cascade((63,), "suffix", store=n, max_model_len=1 << 20) for n in (0, 1)),
    *(Cascade((8,), "suffix", shared=n) for n in (1, 1000)),
    *(Cascade((1, 3), "suffix", store=1000, capacity=c, max_model_len=16) for c in (1, 3)),
    *(Cascade((n,), "sources", store=7, capacity=c, slots=c) for n, c in ((63, 1), (8, 64))),
    *(StockDrafter(d) for d in (torch.float16, torch.float32)),
    StockDrafter(torch.bfloat16, vocab_size=50257),
    *(Cascade((8,), "sources", sources=n, rows=r) for n, r in ((2, 2), (8, 16))),
    *(Branches(rows=n) for n in (2, 3, 16)),
    *(Branches(dtype=d) for d in (torch.float16, torch.float32)),
    *(Branches(vocab_size=v) for v in (128, 50257, 262144)),
    Branches(length=63, slots=3),
    *(SeveralDrafts(rows=n, length=k) for n, k in ((4, 8), (2, 1), (16, 4), (2, 32))),
    *(SeveralDrafts(dtype=d) for d in (torch.float16, torch.float32)),
    *(SeveralDrafts(vocab_size=v) for v in (128, 50257, 262144)),
    *(Trees(n) for n in (5, MAX_NODES)),
    Trees(dtype=torch.float32),
)


def launch(cases: Iterable[Cascade | StockDrafter | Branches | SeveralDrafts | Trees]) -> None:
    for case in cases:
        case.launch()
