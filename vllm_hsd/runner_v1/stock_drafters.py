"""Our verifier under vLLM's own drafters (see stock_config.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_hsd.runner_v1.noise import RequestNoise, skip_of
from vllm_hsd.runner_v1.sampler import TargetStep, VerifyingSampler
from vllm_hsd.verify import verify_chain


class StockDraftSampler(VerifyingSampler):
    """Verifies the drafts of a stock drafter at sequence level, or coupled where a request is.

    Where the drafter keeps its probabilities (`draft_sample_method: "probabilistic"`) they are the
    proposal probabilities; otherwise a draft token is a point mass.
    """

    def __init__(self, sampler, spec_config=None, device=None) -> None:
        super().__init__(sampler)

    def attach(self, runner: Any) -> None:
        """Take the requests' generators from vLLM's finished runner."""
        self.runner = runner
        vocab_size = runner.model_config.get_vocab_size()
        self.skip = skip_of(self.sampler.topk_topp_sampler, vocab_size)

    def _requests(self, batch: int) -> tuple[None, np.ndarray]:
        noise = np.full(batch, None)
        for i, request_id in enumerate(self.runner.input_batch.req_ids[:batch]):
            generator = self.runner.requests[request_id].generator
            if generator is not None:
                noise[i] = RequestNoise(generator, self.skip)
        return None, noise

    def _verify_drawn(
        self, step: TargetStep, requests: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        greedy, counts = step.sampling.greedy, step.counts[requests]
        (probs, owners), draft_probs = step.rows_of(requests), step.draft_probs
        if not greedy:
            probs, _ = step.sampling.target_probabilities(probs, owners)
        if greedy or draft_probs is None:
            draft_probs = None
        else:
            drafted = np.repeat(np.arange(len(step.counts)), step.counts)
            own = torch.from_numpy(np.isin(drafted, requests)).to(draft_probs.device)
            draft_probs = draft_probs[own].float()
        drafts = step.scheduled[requests]
        valid = np.arange(drafts.shape[1]) < counts[:, None]
        result = verify_chain(
            probs,
            draft_probs,
            torch.from_numpy(drafts[valid]).to(probs.device),
            counts.tolist(),
            method="greedy" if greedy else "block",
        )
        return result.token_ids.cpu().numpy(), result.num_accepted.cpu().numpy()
