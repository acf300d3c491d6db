"""Random batches for the chain kernels."""

import torch


def make_batch(vocab_size, lengths, dtype=torch.float32, one_hot=False, noise=0.7, seed=0):
    """Random requests: every fourth greedy, drafts drawn from their rows."""
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
    law = torch.softmax(draft.float() / scale[:, None], -1)
    tokens = torch.multinomial(law, 1, generator=g)[:, 0]
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


def draft_lse(batch):
    lengths = batch["cu_num_draft_tokens"].diff()
    scale = batch["temperature"].repeat_interleave(lengths)[:, None]
    return torch.logsumexp(batch["draft_logits"].double() / scale, -1).float()
