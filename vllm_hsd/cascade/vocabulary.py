"""Models of one tokenizer whose logits are padded to different sizes.

Qwen2.5's 0.5B to 3B have 151,936 rows of logits, its larger sizes 152,064. In a cascade all
distributions have the target's size V: a drafter proposes nothing beyond it, and gives tokens that
it has no row for no probability. Both are proposal distributions like any other, so verification
stays lossless.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F


def fit_logits(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[..., W] logits cut or padded with -inf to [..., vocab_size], before any softmax."""
    if logits.shape[-1] >= vocab_size:
        return logits[..., :vocab_size]
    return F.pad(logits, (0, vocab_size - logits.shape[-1]), value=-float("inf"))


def readable(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Token ids with those that a model of `vocab_size` tokens has no embedding for as token 0.

    They are tokens that the target emits from its padding, or placeholders that a lookup has found.
    What a drafter makes of one changes how much is accepted, not the distribution.
    """
    return torch.where(token_ids < vocab_size, token_ids, 0)


def differing_token(ours: Mapping[str, int], theirs: Mapping[str, int]) -> int | None:
    """The first id that two tokenizers give to different tokens; None if they agree.

    Args:
        ours, theirs: id of every token. Ids that only one of them knows are padding to the other.
    """
    tokens = {token_id: token for token, token_id in ours.items()}
    differing = (
        token_id for token, token_id in theirs.items() if tokens.get(token_id, token) != token
    )
    return min(differing, default=None)
