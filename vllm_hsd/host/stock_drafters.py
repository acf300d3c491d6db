"""Drafts of vLLM's own drafters as our verifier needs them.

vLLM 0.32 keys a draft token's noise by its position. Block verification looks at all tokens of a
draft, so that a rejected position would meet noise again that is no longer independent of the past.
Here a draft token takes one uniform that is met once, and its row's logsumexp, a by-product
of the draw, is kept for the verifier. Drafts are filtered as the request's own tokens are, and
those of a coupled request take the noise of the target's token at their position.

Some drafters draw without `sample_draft` and write their rows themselves. What they draw is theirs
as long as a position is not met twice with the same noise, which vLLM 0.33 sees to.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample import gumbel

from vllm_hsd.cascade.schedule import first_draw
from vllm_hsd.errors import UserError
from vllm_hsd.host.hooks import REGISTRY, replace_on
from vllm_hsd.host.request_parameters import RequestParameters
from vllm_hsd.kernels.filter_rows import Filters, row_thresholds
from vllm_hsd.kernels.keep_rows import keep_rows
from vllm_hsd.kernels.sample_row import sample_row

_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator"
_SAMPLE_DRAFT = (
    "self hidden_states sample_src_positions idx_mapping temperature seeds "
    "draft_step draft_logits spec_step_idx"
)

# Classes of vLLM's that draw every draft token by `sample_draft`, and those that write rows of
# their own. Only what is read anew in every release gets in: a drafter can draw in other ways.
_SAMPLED = (
    "DFlashSpeculator",
    "EagleSpeculator",
    "Gemma4Speculator",
    "MTPSpeculator",
    "MultiModuleMTPSpeculator",
    "StandaloneARSpeculator",
)
_OWN_ROWS = ("DFlash2Speculator", "LiLiCorrSpeculator")


def kept_drafts(
    speculator: Any, req_states: Any, parameters: RequestParameters
) -> KeptDrafts | None:
    """What is kept of a drafter that has rows; None where it fills them itself.

    Args:
        speculator, req_states, parameters: see `KeptDrafts`.

    Raises:
        UserError: a drafter whose rows are not known to be those that it draws from.
    """
    classes = type(speculator).__mro__
    name = next(each.__name__ for each in classes if each.__module__.startswith("vllm."))
    if name in _SAMPLED:
        return KeptDrafts(speculator, req_states, parameters)
    if name in _OWN_ROWS and hasattr(gumbel, "spec_step_seed"):
        return None
    newer = " or vLLM 0.33 or newer" if name in _OWN_ROWS else ""
    raise UserError(
        f"rejection_sample_method 'hierarchical' does not know the rows that {name} draws from: "
        f"set draft_sample_method to 'greedy', which needs none{newer}."
    )


class KeptDrafts:
    """Draws and logsumexps of a drafter that keeps its rows.

    Args:
        speculator: vLLM's drafter, whose way of drawing is replaced.
        req_states: vLLM's table of requests.
        parameters: of the requests.

    Attributes:
        lse: float32 [max_num_seqs, K], log(sum(exp(row / temperature))) of the kept rows; NaN,
            which ends a draft, until a row is kept.
    """

    def __init__(self, speculator: Any, req_states: Any, parameters: RequestParameters) -> None:
        rows = speculator.draft_logits
        self.speculator, self.req_states = speculator, req_states
        self.parameters = parameters
        shape, nothing = rows.shape[:2], float("nan")
        self.lse = torch.full(shape, nothing, dtype=torch.float32, device=rows.device)
        # CUDA graphs of the drafter read these, so they stay where they are.
        self.temperature = torch.zeros_like(parameters.temperature, device=rows.device)
        self.filters = Filters(
            *(torch.zeros_like(values, device=rows.device) for values in parameters.filters)
        )
        parameters.followers.append(self)
        replace_on(speculator, f"{_SPECULATOR}.sample_draft", by=self)

    def take_parameters(self) -> None:
        """Those of the requests have changed."""
        self.temperature.copy_(self.parameters.temperature)
        for mine, theirs in zip(self.filters, self.parameters.filters, strict=True):
            mine.copy_(theirs)


@REGISTRY.replaces_on_runner(
    f"{_SPECULATOR}.sample_draft",
    (_SAMPLE_DRAFT, f"{_SAMPLE_DRAFT} num_steps"),
    why="draws a draft token, filtered as its request, and keeps its row's logsumexp",
    until="vLLM's drafters draw with uniforms that block verification meets once",
)
def sample_draft(
    original,
    kept: KeptDrafts,
    hidden_states,
    sample_src_positions,
    idx_mapping,
    temperature,
    seeds,
    draft_step,
    draft_logits,
    spec_step_idx=0,
    num_steps=1,
):
    logits = kept.speculator.compute_draft_logits(hidden_states, spec_step_idx)
    kept.speculator._maybe_predict_acceptance(logits, idx_mapping, draft_step)
    # The stored row is the distribution that the token is drawn from, so it is rounded first.
    logits = logits.to(draft_logits.dtype)
    slots = idx_mapping.contiguous()
    thresholds = row_thresholds(logits, kept.temperature, kept.filters, index=slots)
    temperature = kept.temperature[slots]
    token_ids, lse = sample_row(
        logits,
        temperature,
        seeds[slots],
        first_draw(kept.req_states.total_len.gpu[slots].long()) + draft_step,
        thresholds=thresholds,
        positions=sample_src_positions,
    )
    keep_rows(draft_logits, kept.lse, logits, lse, temperature, thresholds, slots, draft_step)
    return token_ids
