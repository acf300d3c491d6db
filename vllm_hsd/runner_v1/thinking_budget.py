"""`thinking_token_budget` on the V1 runner: which rows of the target must end the thinking.

vLLM's holder of these budgets counts tokens in steps and finds its rows by the lengths of all
drafts; where the end falls behind a draft, that is the next request's row. Here its state follows
the text token by token, as it does without speculation, and each request has its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# vLLM's own value for a token that must be sampled.
_FORCED = 1e9
# In a request's state, which vLLM moves with its row: prefixes of the output it has seen.
_SEEN = "hsd_seen"


def force_end_of_thinking(
    holder: Any,
    logits: torch.Tensor,
    outputs: Sequence[list[int]],
    counts: np.ndarray,
    drafts: np.ndarray,
) -> None:
    """Force the tokens that end a request's thinking, where its budget is spent.

    Args:
        holder: vLLM's ThinkingBudgetStateHolder.
        logits: [sum(counts + 1), V], request after request; changed in place.
        outputs: of every request, the tokens of its output.
        counts: [batch] int64 draft lengths.
        drafts: [batch, max(counts)] int64 draft token ids, padded with -1.
    """
    first = np.cumsum(counts + 1) - counts - 1
    for request, state in holder._state.items():
        if request >= len(counts):
            continue
        output = list(outputs[request])
        for length in range(state.get(_SEEN, 0), len(output) + 1):
            _follow(holder, state, output[:length])
        state[_SEEN] = len(output) + 1
        ahead = dict(state)
        for place in range(int(counts[request]) + 1):
            if place:
                output.append(int(drafts[request, place - 1]))
                _follow(holder, ahead, output)
            if (token := _forced(holder, ahead)) is not None:
                logits[first[request] + place, token] = _FORCED


def _follow(holder: Any, state: dict[str, Any], output: list[int]) -> None:
    """Take in one more token of the output, as in a step without speculation."""
    state |= {"output_tok_ids": output, "spec_token_ids": [], "in_spec_mode": False}
    state["force_index"] = []
    holder._update_think_state(state)


def _forced(holder: Any, state: dict[str, Any]) -> int | None:
    """The token that must come next."""
    end = holder.think_end_token_ids
    if not state["in_end"] or not state["force_index"] or state["end_count"] >= len(end):
        return None
    return end[state["end_count"]]
