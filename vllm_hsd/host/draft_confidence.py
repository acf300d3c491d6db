"""Confidences of our drafts, made of vLLM's estimator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

from vllm_hsd.cascade.adaptive_verification import DraftConfidence


def draft_confidence(
    max_num_reqs: int,
    longest: int,
    device: torch.device,
    lengths: Callable[[torch.Tensor], torch.Tensor],
) -> DraftConfidence:
    """For request slots 0 .. max_num_reqs - 1 and drafts of at most `longest` tokens."""
    # The last slot is of no request.
    estimator = OnlineAcceptanceEstimator(max_num_reqs + 1, longest, device)
    return DraftConfidence(estimator, lengths)
