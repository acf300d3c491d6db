"""Our verifier under vLLM's own drafters: `rejection_sample_method: "block"`."""

from __future__ import annotations

import numpy as np
import torch
from pydantic import ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.runner_v1.sampler import VerifyingSampler
from vllm_hsd.runner_v1.sampling import RequestSampling
from vllm_hsd.verify import verify_chain

METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp", "ngram", "suffix")


@config
class BlockVerificationConfig(SpeculativeConfig):
    """A stock drafter whose drafts our sampler verifies; build it with `create`."""

    verifier: str = "block"
    """Ours; `rejection_sample_method` stays "standard", where vLLM keeps a drafter's rows."""

    @classmethod
    def create(cls, raw: dict, target_model_config, target_parallel_config):
        """vLLM's configuration of a stock drafter.

        Raises:
            UserError: the drafter is not one that vLLM's V1 runner hosts, or vLLM refuses a key.
        """
        try:
            parsed = cls(
                **{key: value for key, value in raw.items() if key != "rejection_sample_method"},
                target_model_config=target_model_config,
                target_parallel_config=target_parallel_config,
            )
        except ValidationError as error:
            fault = error.errors()[0]
            key = ".".join(map(str, fault["loc"])) or "speculative_config"
            raise UserError(f"vLLM refuses {brief(key, 80)}: {brief(fault['msg'])}.") from error
        if parsed.method not in METHODS:
            raise UserError(
                f"rejection_sample_method 'block' works with the methods {', '.join(METHODS)}, "
                f"not with {quoted(parsed.method)}."
            )
        return parsed


class StockDraftSampler(VerifyingSampler):
    """Verifies the drafts of a stock drafter at sequence level.

    Where the drafter gives its laws (`draft_sample_method: "probabilistic"`) they are the
    proposal rows; otherwise a draft token counts as certain, a one-hot row. A seeded request
    draws from vLLM's generator of it, in one call, which is what the runner rewinds where a
    prompt chunk's sample is thrown away.
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
            metadata: draft tokens of the batch, -1 for slots that hold none.
            draft_probs: [sum(n_i), V] proposal rows, or None.
            logits: [sum(n_i + 1), V] the target's logits, request after request.
            sampling_metadata: sampling parameters of the batch.

        Returns:
            sampled_token_ids [batch, max(n_i) + 1] int32, padded with -1.
        """
        counts = np.array(metadata.num_draft_tokens, dtype=np.int64)
        token_ids = metadata.draft_token_ids
        drafts = np.split(token_ids.clamp(min=0).cpu().numpy(), np.cumsum(counts)[:-1])
        laws = RequestSampling(sampling_metadata)
        num_rows = (counts + 1).tolist()
        processed = laws.target_logits(logits, num_rows, [draft.tolist() for draft in drafts])
        owners = np.repeat(np.arange(len(counts)), counts + 1)
        result = verify_chain(
            processed if laws.greedy else laws.probabilities(processed, owners),
            None if laws.greedy or draft_probs is None else draft_probs.float(),
            token_ids,
            counts.tolist(),
            method="greedy" if laws.greedy else "block",
            generators=sampling_metadata.generators,
        )
        sampled = result.token_ids.to(torch.int32)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=self._logprobs(metadata, logits, processed, sampled, laws, owners),
        )
