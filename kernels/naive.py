"""Plain torch twins of the kernels, with the same coins: what the tests compare with.

Softmax in float64, then ``vllm_hsd.verify``. Readable and slow; nothing here is tuned.
"""

from itertools import pairwise

import torch

from vllm_hsd.kernels.chain_verify import ChainResult
from vllm_hsd.kernels.rng import ACCEPT, DRAFT, FINAL, stream_id
from vllm_hsd.kernels.tree_verify import TreeResult
from vllm_hsd.verify import uniforms
from vllm_hsd.verify import verify_chain as verify_chain_probs
from vllm_hsd.verify.residual import BlockedCDF
from vllm_hsd.verify.tree import ROOT, Tree, TreeRows, traversal_stops


def probabilities(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature) in float64; one-hot at the lowest argmax where it is 0.

    Args:
        logits: [N, V]; temperature: float32 [N]. Rows that are not laws come out as NaN.
    """
    x = logits.double()
    hot = temperature > 0
    # The kernels multiply by the float32 reciprocal.
    scale = torch.where(hot, 1 / torch.where(hot, temperature, 1.0), 1.0).double()
    rows = torch.softmax(x * scale[:, None], -1)
    peak = x.max(-1).values
    one_hot = torch.nn.functional.one_hot((x == peak[:, None]).int().argmax(-1), x.shape[1])
    greedy = torch.where(peak.isfinite()[:, None], one_hot.double(), float("nan"))
    return torch.where(hot[:, None], rows, greedy)


def sample_row(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    level: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``vllm_hsd.kernels.sample_row.sample_row``; the normaliser in float64."""
    rows = probabilities(logits, temperature)
    coins = uniforms(seeds, torch.tensor(stream_id(level, DRAFT)), draws)
    cumulative = rows.cumsum(-1)
    goal = coins[:, None] * cumulative[:, -1:]
    token = ((cumulative > goal) & (rows > 0)).int().argmax(-1)
    token = torch.where(cumulative[:, -1].isnan(), -1, token)
    scaled = logits.double() / torch.where(temperature > 0, temperature, 1.0).double()[:, None]
    return token, torch.where(temperature > 0, scaled.logsumexp(-1), 0.0)


def verify_chain(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    cu_num_draft_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    max_draft_tokens: int,
    method: str = "block",
    level: int = 0,
    draft_temperature: torch.Tensor | None = None,
) -> ChainResult:
    """``vllm_hsd.kernels.chain_verify.verify_chain``, one request at a time."""
    cu = cu_num_draft_tokens.tolist()
    if draft_temperature is None:
        draft_temperature = temperature
    results = []
    for i, (begin, end) in enumerate(pairwise(cu)):
        tokens = draft_token_ids[begin:end].clone()
        tokens[(tokens < 0) | (tokens >= target_logits.shape[1])] = -1
        n = end - begin
        target = probabilities(target_logits[begin + i : end + i + 1], temperature[i].expand(n + 1))
        draft = None
        if draft_logits is not None and draft_temperature[i] > 0 and temperature[i] > 0:
            draft = probabilities(draft_logits[begin:end], draft_temperature[i].expand(n))
        coins = torch.cat(
            (
                uniforms(
                    seeds[i], torch.tensor(stream_id(level, ACCEPT)), draws[i] + torch.arange(n)
                ),
                uniforms(seeds[i], torch.tensor(stream_id(level, FINAL)), draws[i])[None],
            )
        )
        if target[0].isnan().any():
            results.append(([-1] * (n + 1), 0))
            continue
        out = verify_chain_probs(target, draft, tokens, [n], method=method, uniforms=coins)
        results.append((out.token_ids[0].tolist(), int(out.num_accepted[0])))
    token_ids = torch.full((len(results), max_draft_tokens + 1), -1, dtype=torch.int64)
    for i, (row, _) in enumerate(results):
        token_ids[i, : len(row)] = torch.tensor(row)
    accepted = torch.tensor([n for _, n in results], dtype=torch.int32)
    return ChainResult(token_ids, accepted, (token_ids >= 0).sum(-1).to(torch.int32))


def verify_tree(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    draws: torch.Tensor,
    *,
    replacement: bool = True,
    level: int = 0,
    draft_temperature: torch.Tensor | None = None,
) -> TreeResult:
    """``vllm_hsd.kernels.tree_verify.verify_tree``, one request at a time."""
    batch, rows, vocab_size = target_logits.shape
    if draft_temperature is None:
        draft_temperature = temperature
    token_ids = torch.full((batch, rows), -1, dtype=torch.int64)
    path = torch.full((batch, rows - 1), -1, dtype=torch.int64)
    for i in range(batch):
        number, kept, parent, token = {ROOT: ROOT}, [], [], []
        for n, (x, above) in enumerate(zip(tokens[i].tolist(), parents[i].tolist(), strict=True)):
            if 0 <= x < vocab_size and above in number:
                number[n] = len(kept)
                kept.append(n)
                parent.append(above)
                token.append(x)
        tree = Tree([number[p] for p in parent], token)
        target = probabilities(target_logits[i], temperature[i].expand(rows))
        target = target[[0, *(n + 1 for n in kept)]]
        proposal = None
        if draft_logits is not None and draft_temperature[i] > 0 and temperature[i] > 0:
            proposal = probabilities(draft_logits[i], draft_temperature[i].expand(rows))
            proposal = torch.stack([proposal[p + 1] for p in parent]) if kept else proposal[:0]
            for k in range(len(kept)) if not replacement else ():
                earlier = [token[j] for j in range(k) if parent[j] == parent[k]]
                proposal[k, earlier] = 0
                proposal[k] /= proposal[k].sum()
        coins = uniforms(
            seeds[i], torch.tensor(stream_id(level, ACCEPT)), draws[i] + torch.arange(rows - 1)
        )
        last = uniforms(seeds[i], torch.tensor(stream_id(level, FINAL)), draws[i])
        if target[0].isnan().any():
            continue
        laws = TreeRows(target, proposal, tree, "traversal")
        node, row = next(
            (node, row)
            for node, stop, row in traversal_stops(laws)
            if node == ROOT or coins[kept[node]] < stop
        )
        nodes = laws.path_to(node)
        out = [token[n] for n in nodes]
        if laws.target_ok[node + 1]:
            out.append(int(BlockedCDF(row).draw(last[None])))
        token_ids[i, : len(out)] = torch.tensor(out, dtype=torch.int64)
        path[i, : len(nodes)] = torch.tensor([kept[n] for n in nodes], dtype=torch.int64)
    accepted = (path >= 0).sum(-1).to(torch.int32)
    return TreeResult(token_ids, path, accepted, (token_ids >= 0).sum(-1).to(torch.int32))
