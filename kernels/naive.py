"""The plain twins of the kernels that verify and draw: in torch, with the same uniforms.

Softmax in float64, then `vllm_hsd.rules`, one request at a time. Names, arguments, shapes and
results are those of the kernels; nothing that serves imports this.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_hsd.kernels.branch_walk import WalkResult
from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.filter_rows import Filters
from vllm_hsd.kernels.tree_verify import TreeResult
from vllm_hsd.rules import MAX_KERNEL_DRAFT
from vllm_hsd.rules import verify_chain as verify_chain_probs
from vllm_hsd.rules import verify_tree as verify_tree_probs
from vllm_hsd.rules.branches import follow
from vllm_hsd.rules.residual import point_masses
from vllm_hsd.rules.rng import host_uniforms
from vllm_hsd.rules.tree import ROOT, Tree


def uniforms(seeds: Tensor, level: int, draws: Tensor) -> Tensor:
    """float64 in [0, 1) for each (seed, level, draw), as `rng.uniform`."""
    found = host_uniforms(seeds.numpy(), np.asarray(level, np.int64), draws.numpy())
    return torch.from_numpy(found)


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    """[N, V] logits / [N] temperature in float32 as kernels compute it, unscaled where it is 0."""
    # The kernels multiply by the float32 reciprocal.
    scale = torch.where(temperature > 0, 1 / torch.where(temperature > 0, temperature, 1.0), 1.0)
    return logits.float() * scale[:, None]


def row_thresholds(
    logits: Tensor,
    temperature: Tensor,
    filters: Filters,
    *,
    index: Tensor | None = None,
    rows_per_request: int = 1,
) -> Tensor:
    """Of `filter_rows`: float32 [N], the least scaled logit that min-p, top-k and top-p keep."""
    if index is None:
        index = torch.arange(len(logits)) // rows_per_request
    temperature = torch.where(index >= 0, temperature[index], 0.0)
    filters = Filters(*(values[index] for values in filters))
    scaled = scaled_logits(logits, temperature.abs())
    thresholds = torch.full((len(logits),), -float("inf"))
    for i, x in enumerate(scaled):
        top_k, top_p, min_p = (values[i] for values in filters)
        if temperature[i] == 0 or not x.logsumexp(0).isfinite():
            continue
        if min_p > 0:
            thresholds[i] = x.max() + min_p.log()
        kept = x[(x >= thresholds[i]) & (x > -float("inf"))].sort(descending=True).values
        if 0 < top_k < len(x):
            thresholds[i] = kept[min(int(top_k), len(kept)) - 1]
        if top_p < 1:
            mass = (kept[kept >= thresholds[i]] - kept[0]).double().exp().cumsum(0)
            thresholds[i] = kept[int((mass < mass[-1] * top_p.double()).sum())]
    return thresholds


def filtered(logits: Tensor, temperature: Tensor, thresholds: Tensor) -> Tensor:
    """[N, V] logits with -inf below the rows' thresholds."""
    below = scaled_logits(logits, temperature.abs()) < thresholds[:, None]
    return logits.masked_fill(below, -float("inf"))


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """float32 [N, V], the noise of ``vllm_hsd.kernels.rng.gumbel`` for each (seed, position)."""

    def rotated(value: np.ndarray, shift: int) -> np.ndarray:
        return (value << np.uint32(shift)) | (value >> np.uint32(32 - shift))

    def mixed(h: np.ndarray, key: np.ndarray) -> np.ndarray:
        key = rotated(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        return rotated(h ^ key, 13) * np.uint32(5) + np.uint32(0xE6546B64)

    words = seeds.numpy().astype(np.int64).view(np.uint32).reshape(-1, 2)
    h = np.zeros(len(words), np.uint32)
    for word in (words[:, 0], words[:, 1], positions.numpy().astype(np.uint32)):
        h = mixed(h, word)
    h = mixed(h[:, None], np.arange(vocab_size, dtype=np.uint32)) ^ np.uint32(16)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    u = ((h ^ (h >> np.uint32(16))).astype(np.float64) + 0.5) * 2.0**-32
    return torch.from_numpy(-np.log(-np.log1p(-u))).float()


def perturbed(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[N, V]: logits / -temperature plus noise where it is negative, else the logits."""
    noisy = logits.float() / temperature.abs()[:, None]
    noisy += gumbel(seeds, positions, logits.shape[1])
    return torch.where((temperature < 0)[:, None], noisy, logits)


def probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature) in float64; one-hot at the argmax where it is 0.

    A row that is invalid (a NaN or +inf in it, or only -inf) is NaN everywhere at a temperature
    above 0, as in torch and vLLM. The argmax at 0 has NaN as the maximum.
    """
    x = scaled_logits(logits, temperature).double()
    one_hot = torch.nn.functional.one_hot(x.argmax(-1), x.shape[1]).double()
    return torch.where((temperature > 0)[:, None], torch.softmax(x, -1), one_hot)


def sample_row(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draws: Tensor,
    *,
    level: int = 0,
    draw_offset: int = 0,
    thresholds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The logsumexp in float64."""
    if thresholds is not None:
        logits = filtered(logits, temperature, thresholds)
    if positions is not None:
        logits = perturbed(logits, temperature, seeds, positions)
    rows = probabilities(logits, temperature)
    u = uniforms(seeds, level, draws + draw_offset)
    cumulative = rows.cumsum(-1)
    goal = u[:, None] * cumulative[:, -1:]
    # All of a NaN row compares as False: token 0, which is the argmax of NaN in vLLM.
    token = ((cumulative > goal) & (rows > 0)).int().argmax(-1)
    lse = scaled_logits(logits, temperature).double().logsumexp(-1)
    return token, torch.where(temperature > 0, lse, 0.0)


def verify_chain(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draws: Tensor,
    *,
    max_draft_tokens: int,
    method: str = "block",
    level: int = 1,
    draft_temperature: Tensor | None = None,
) -> ChainResult:
    """Of chains whose tokens and rows are flat, one request at a time."""
    if draft_temperature is None:
        draft_temperature = temperature
    shape = len(cu_num_draft_tokens) - 1, max_draft_tokens + 1
    token_ids = torch.full(shape, -1, dtype=torch.int64)
    lse = torch.full(shape, float("nan"))
    num_accepted = torch.zeros(shape[0], dtype=torch.int32)
    for i, (begin, end) in enumerate(pairwise(cu_num_draft_tokens.tolist())):
        tokens = draft_token_ids[begin:end].clone()
        tokens[(tokens < 0) | (tokens >= target_logits.shape[1])] = -1
        n = end - begin
        target = probabilities(target_logits[begin + i : end + i + 1], temperature[i].expand(n + 1))
        draft = point_masses(tokens, target.shape[1])
        if draft_logits is not None and draft_temperature[i] > 0 and temperature[i] > 0:
            draft = probabilities(draft_logits[begin:end], draft_temperature[i].expand(n))
        u = uniforms(seeds[i], level, draws[i] + torch.arange(n + 1)).tolist()
        out, accepted = verify_chain_probs(target, draft, tokens.tolist(), u, method=method)
        num_accepted[i] = accepted
        token_ids[i, : len(out)] = torch.tensor(out)
        lse[i, : accepted + 1] = 0
        if temperature[i] > 0:
            rows = target_logits[begin + i : begin + i + accepted + 1]
            scaled = scaled_logits(rows, temperature[i].expand(len(rows)))
            lse[i, : accepted + 1] = scaled.double().logsumexp(-1).float()
    return ChainResult(token_ids, num_accepted, (token_ids >= 0).sum(-1).to(torch.int32), lse)


def verify_chain_padded(
    target_logits: Tensor,
    draft_logits: Tensor | None,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draws: Tensor,
    *,
    draw_offset: int = 0,
    draft_temperature: Tensor | None = None,
    draft_lse: Tensor | None = None,
    draft_index: Tensor,
    draft_length: Tensor,
    thresholds: Tensor | None = None,
    positions: Tensor | None = None,
    position_skip: int = 0,
    **options: Any,
) -> ChainResult:
    """Where every request has a row; options: see `verify_chain`."""
    state = idx_mapping.long()
    owner = state.repeat_interleave(cu_num_logits.diff())
    if thresholds is not None:
        target_logits = filtered(target_logits, temperature[owner], thresholds)
    if positions is not None:
        rows = torch.arange(len(owner))
        request = torch.arange(len(state)).repeat_interleave(cu_num_logits.diff())
        positions = positions[rows + (request + 1) * position_skip]
        target_logits = perturbed(target_logits, temperature[owner], seeds[owner], positions)
    target, draft, tokens, lengths = [], [], [], []
    for i, (begin, end) in enumerate(pairwise(cu_num_logits.tolist())):
        entry = int(draft_index[i])
        n = min(int(draft_length[entry]), end - begin - 1) if entry >= 0 else 0
        lengths.append(n)
        target.append(target_logits[begin : begin + n + 1])
        tokens.append(draft_sampled[begin + 1 : begin + n + 1])
        if draft_logits is not None:
            draft.append(draft_logits[entry, :n])
    return verify_chain(
        torch.cat(target),
        torch.cat(draft) if draft else None,
        torch.cat(tokens),
        torch.tensor([0, *lengths]).cumsum(0),
        temperature[state],
        seeds[state],
        draws[state] + draw_offset,
        **options,
        draft_temperature=None if draft_temperature is None else draft_temperature[state],
    )


def follow_branches(
    chain: ChainResult,
    target_logits: Tensor,
    draft_sampled: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    offsets: Tensor,
    counts: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draws: Tensor,
    *,
    max_tokens: int,
    level: int = 1,
    thresholds: Tensor | None = None,
    positions: Tensor | None = None,
) -> WalkResult:
    """Of `branch_walk`: the tokens after a verified chain, along branches of point masses."""
    batch, rows = offsets.shape
    state, first = idx_mapping.long(), cu_num_logits[:-1, None] + offsets
    branches = np.full((batch, rows - 1, max_tokens), -1, dtype=np.int64)
    tokens = (counts[:, 1:].numpy() - 1).clip(0)
    for i, j in np.ndindex(batch, rows - 1):
        begin = int(first[i, j + 1]) + 1
        branches[i, j, : tokens[i, j]] = draft_sampled[begin : begin + int(tokens[i, j])]

    def draw(requests: np.ndarray, numbers: np.ndarray, places: np.ndarray) -> np.ndarray:
        row, own = first[requests, numbers] + torch.from_numpy(places), state[requests]
        token, lse = sample_row(
            target_logits[row],
            temperature[own],
            seeds[own],
            draws[own] + MAX_KERNEL_DRAFT + 1 + torch.from_numpy(places),
            level=level,
            thresholds=None if thresholds is None else thresholds[row],
            positions=None if positions is None else positions[row],
        )
        return torch.where(lse.isfinite(), token, -1).numpy()

    token_ids, emitted, winner = follow(
        chain.token_ids.numpy(), chain.num_emitted.numpy().astype(np.int64), branches, tokens, draw
    )
    padded = np.full((batch, max_tokens + 1), -1, dtype=np.int64)
    padded[:, : token_ids.shape[1]] = token_ids[:, : max_tokens + 1]
    ids, num_emitted, winners = map(torch.from_numpy, (padded, emitted, winner))
    return WalkResult(ids, num_emitted.int(), winners.int())


def verify_tree(
    target_logits: Tensor,
    draft_logits: Tensor,
    tokens: Tensor,
    parents: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draws: Tensor,
    *,
    level: int = 1,
    draft_temperature: Tensor | None = None,
) -> TreeResult:
    """Of `tree_verify`: one tree at a time, without the nodes that have no token."""
    batch, rows, vocab_size = target_logits.shape
    if draft_temperature is None:
        draft_temperature = temperature
    token_ids = torch.full((batch, rows), -1, dtype=torch.int64)
    path = torch.full((batch, rows - 1), -1, dtype=torch.int64)
    for i in range(batch):
        # Nodes without a token are left out, with everything below them.
        number = {ROOT: ROOT}
        kept: list[int] = []
        parent: list[int] = []
        token: list[int] = []
        for n, (x, above) in enumerate(zip(tokens[i].tolist(), parents[i].tolist(), strict=True)):
            if 0 <= x < vocab_size and above in number:
                number[n] = len(kept)
                kept.append(n)
                parent.append(above)
                token.append(x)
        tree = Tree([number[p] for p in parent], token)
        target = probabilities(target_logits[i], temperature[i].expand(rows))
        target = target[[0, *(n + 1 for n in kept)]]
        proposal = probabilities(draft_logits[i], draft_temperature[i].expand(rows))
        proposal = torch.stack([proposal[p + 1] for p in parent]) if kept else proposal[:0]
        u = uniforms(seeds[i], level, draws[i] + torch.arange(rows))
        u = u[[*(n + 1 for n in kept), 0]]
        out, nodes = verify_tree_probs(target, proposal, tree, u.tolist())
        token_ids[i, : len(out)] = torch.tensor(out)
        path[i, : len(nodes)] = torch.tensor([kept[n] for n in nodes], dtype=torch.int64)
    accepted = (path >= 0).sum(-1).to(torch.int32)
    return TreeResult(token_ids, path, accepted, (token_ids >= 0).sum(-1).to(torch.int32))
