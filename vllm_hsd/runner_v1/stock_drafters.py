"""Our verifier under vLLM's own drafters (see stock_config.py)."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hsd.runner_v1.sampler import VerifyingSampler, padded
from vllm_hsd.runner_v1.sampling import RequestSampling
from vllm_hsd.verify import verify_chain


class StockDraftSampler(VerifyingSampler):
    """Verifies the drafts of a stock drafter at sequence level.

    Where the drafter keeps its probabilities (`draft_sample_method: "probabilistic"`) they are the
    proposal probabilities; otherwise a draft token is a point mass. A seeded request draws from
    vLLM's generator of it, in one call, which is what the runner rewinds where a prompt chunk's
    sample is thrown away.
    """

    def __init__(self, sampler, spec_config=None, device=None) -> None:
        super().__init__(sampler)

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample every request's next tokens.

        Args:
            metadata: draft tokens of the batch, -1 for positions that hold none.
            draft_probs: [sum(n_i), V] proposal probabilities, or None.
            logits: [sum(n_i + 1), V] the target's logits, request after request.
            sampling_metadata: sampling parameters of the batch.

        Returns:
            sampled_token_ids [batch, max(n_i) + 1] int32, padded with -1.
        """
        counts = np.array(metadata.num_draft_tokens, dtype=np.int64)
        token_ids = metadata.draft_token_ids
        sampling = RequestSampling(sampling_metadata)
        drafts = padded(token_ids.cpu().numpy(), counts)
        processed = sampling.target_logits(logits, counts, drafts)
        owners = np.repeat(np.arange(len(counts)), counts + 1)
        probs = processed
        if not sampling.greedy:
            probs, _ = sampling.target_probabilities(processed, owners)
        result = verify_chain(
            probs,
            None if sampling.greedy or draft_probs is None else draft_probs.float(),
            token_ids,
            counts.tolist(),
            method="greedy" if sampling.greedy else "block",
            generators=sampling_metadata.generators,
        )
        sampled = result.token_ids.to(torch.int32)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=self._logprobs(logits, processed, sampled, sampling, owners),
        )
