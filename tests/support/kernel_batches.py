"""Random batches for the kernels, and invalid rows."""

import torch

from vllm_hsd.kernels.chain_verify import ChainResult, verify_chain_padded

#        0
#     /  |  \
#    0   1   2   9      4 children of the root, two levels below
PARENTS = (-1, -1, -1, 0, 0, 1, 3, 3, 6, -1)

NAN, INF = float("nan"), float("inf")


def _with(columns, values):
    """Change logits [N, V >= 64] in place."""

    def change(rows):
        rows[:, columns] = torch.tensor(values, dtype=rows.dtype)

    return change


# The first NaN wins over an infinity.
UNUSABLE_ROWS = {
    "nan": _with([40, 7, 30, 33], [INF, NAN, NAN, NAN]),
    "masked": _with(slice(None), -INF),
    "infinite": _with([36, 50], INF),
}


def make_chains(vocab_size, lengths, dtype=torch.float32, one_hot=False, noise=0.7, seed=0):
    """Random chains: every fourth request greedy, drafts drawn from their rows."""
    g = torch.Generator().manual_seed(seed)
    batch, drafted = len(lengths), sum(lengths)
    target = (torch.randn(drafted + batch, vocab_size, generator=g) * 2).to(dtype)
    owner = torch.arange(batch).repeat_interleave(torch.tensor(lengths))
    rows = torch.arange(drafted) + owner
    draft = target[rows].float() + noise * torch.randn(drafted, vocab_size, generator=g)
    draft = draft.to(dtype)
    temperature = torch.rand(batch, generator=g) + 0.5
    temperature[::4] = 0
    scale = torch.where(temperature > 0, temperature, 0.5)[owner]
    probs = torch.softmax(draft.float() / scale[:, None], -1)
    tokens = torch.multinomial(probs, 1, generator=g)[:, 0]
    if one_hot:
        best = target[rows].float().argmax(-1)
        tokens = torch.where(torch.rand(drafted, generator=g) < 0.7, best, tokens)
    return {
        "target_logits": target,
        "draft_logits": None if one_hot else draft,
        "draft_token_ids": tokens,
        "cu_num_draft_tokens": torch.tensor([0, *lengths]).cumsum(0),
        "temperature": temperature,
        "seeds": torch.randint(-(2**62), 2**62, (batch,), generator=g),
        "draws": torch.randint(0, 2**40, (batch,), generator=g),
        "max_draft_tokens": max(lengths),
    }


def padded(
    target_logits, draft_logits, draft_token_ids, cu_num_draft_tokens, *, draft_lse=None, **rest
):
    """Arguments of `verify_chain_padded` for chains whose tokens and rows are flat.

    Requests are in the slots in reverse; what no request has is NaN, or no token.
    """
    batch, device = len(cu_num_draft_tokens) - 1, target_logits.device
    request = torch.arange(batch, device=device)
    owner = request.repeat_interleave(cu_num_draft_tokens.diff())
    drafted = torch.arange(len(owner), device=device)
    sampled = torch.full((len(target_logits),), -(2**31), device=device)
    sampled[drafted + owner + 1] = draft_token_ids.long()
    slots = batch - 1 - request

    def by_slot(values):
        if values is None:
            return None
        shape = batch, rest["max_draft_tokens"], *values.shape[1:]
        found = values.new_full(shape, float("nan"))
        found[slots[owner], drafted - cu_num_draft_tokens[owner]] = values
        return found

    return {
        "target_logits": target_logits,
        "draft_logits": by_slot(draft_logits),
        "draft_sampled": sampled,
        "cu_num_logits": cu_num_draft_tokens + torch.arange(batch + 1, device=device),
        "idx_mapping": slots,
        "draft_lse": by_slot(draft_lse),
        **{k: v.flip(0) if isinstance(v, torch.Tensor) else v for k, v in rest.items()},
    }


def verify_flat(**chains) -> ChainResult:
    return verify_chain_padded(**padded(**chains))


def draft_lse(batch):
    """logsumexp of the proposals at the target's temperature, float32 [drafted]."""
    lengths = batch["cu_num_draft_tokens"].diff()
    scale = batch["temperature"].repeat_interleave(lengths)[:, None]
    return torch.logsumexp(batch["draft_logits"].double() / scale, -1).float()


def make_trees(batch, vocab_size, parents=PARENTS, seed=0, dtype=torch.float32):
    """Trees whose siblings were drawn from their parent's row, as the kernel takes them."""
    g = torch.Generator().manual_seed(seed)
    rows = len(parents) + 1
    target = (torch.randn(batch, rows, vocab_size, generator=g) * 2).to(dtype)
    draft = target.float() + 1.5 * torch.randn(batch, rows, vocab_size, generator=g)
    draft = draft.to(dtype)
    temperature = torch.rand(batch, generator=g) + 0.5
    tokens = torch.full((batch, rows - 1), -1)
    above = torch.tensor(parents).repeat(batch, 1)
    for i in range(batch):
        probs = torch.softmax(draft[i].float() / temperature[i], -1)
        for node in range(-1, rows - 1):
            children = (above[i] == node).nonzero()[:, 0]
            if len(children):
                drawn = torch.multinomial(probs[node + 1], len(children), True, generator=g)
                tokens[i, children] = drawn
                # What is below a sibling drawn again is below the first one.
                first = children[(drawn[:, None] == drawn).int().argmax(1)]
                for child, twin in zip(children, first, strict=True):
                    above[i][above[i] == child] = twin
    return {
        "target_logits": target,
        "draft_logits": draft,
        "tokens": tokens,
        "parents": above,
        "temperature": temperature,
        "seeds": torch.randint(-(2**62), 2**62, (batch,), generator=g),
        "draws": torch.randint(0, 2**40, (batch,), generator=g),
    }
