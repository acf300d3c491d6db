"""The target's sampler on vLLM's V2 runner: our Triton verifier, and vLLM's for all else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.model_executor.layers.vocab_parallel_embedding import pad_vocab_size
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _flatten_sampled_kernel,
)

from vllm_hsd.cascade.schedule import DRAWS_PER_LENGTH
from vllm_hsd.host.hooks import REGISTRY, replace_on
from vllm_hsd.host.request_parameters import RequestParameters
from vllm_hsd.host.stock_drafters import KeptDrafts
from vllm_hsd.kernels.blocks import aligned
from vllm_hsd.kernels.chain_verify import ChainResult, verify_chain_padded
from vllm_hsd.kernels.filter_rows import row_thresholds

_SAMPLER = "vllm.v1.worker.gpu.sample.sampler.Sampler"
_STATES = "vllm.v1.worker.gpu.sample.states.SamplingStates"


class BlockRejectionSampler(RejectionSampler):
    """Block verification by our kernels; log-probabilities and all else are vLLM's.

    A request with a seed is coupled: each of its tokens is the one that vLLM draws at its position
    without speculation, and a draft token is accepted if it is that one. The others draw from our
    uniforms, in steps without drafts too.

    Args:
        sampler: vLLM's sampler; three of its methods are replaced.
        spec_config: the configuration.
        device: of the model.
        parameters: of the requests.
        kept: the drafter's logsumexps, None if its draft tokens are point masses.

    vLLM's `__call__` hands parts of a batch to `_verify`, which calls `verdict`. A subclass says by
    `drafts` and `draft_rows` where the drafts are, and by `emitted` what follows from the verdict.
    """

    # Stream of the target's uniforms (see `rules.rng`) and the rule.
    level, method = 1, "block"

    def __init__(
        self, sampler, spec_config, device, parameters: RequestParameters, kept: KeptDrafts | None
    ) -> None:
        super().__init__(sampler, spec_config, device)
        self.longest = self.num_speculative_steps
        self.parameters, self.kept = parameters, kept
        # vLLM reads the processed logits after the sampler.
        self.returns_processed = (
            sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES or sampler.return_sampling_mask
        )
        # Requests whose logits vLLM has to process: for more than a temperature and filters, or
        # filtered ones that are coupled, whose text is to be vLLM's to the last bit.
        self.processed = np.zeros_like(sampler.needs_logits_processing)
        # Requests that vLLM itself would have processed for a temperature or filters.
        self.stock_filtered = np.zeros_like(self.processed)
        # Slots of the rows and of the requests of the last verification.
        self.verified: tuple[torch.Tensor, np.ndarray]
        # Most tokens that a request lists for log-probabilities.
        self.most_listed = 0
        # Requests whose list of draft tokens vLLM reads as one chain.
        self.chained = np.zeros_like(self.processed)
        replace_on(sampler.sampling_states, f"{_STATES}.add_request", by=self)
        replace_on(sampler, f"{_SAMPLER}.add_request", f"{_SAMPLER}.sample", by=self)

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        """As vLLM's; a draft token that a grammar refuses is verified before the draft ends.

        The grammar gives its row a mask that allows it nothing, so it is rejected, and the next
        token follows from the residual. Ending the draft before it would draw from the target's
        row instead, which is not lossless for a sampled draft.
        """
        self.parameters.copy_changed()
        # Of the whole batch, which vLLM may verify in parts.
        listed = self.sampler.logprob_token_ids_state
        self.most_listed = listed.max_num_token_ids(input_batch.idx_mapping_np)
        if invalid_drafts is not None:
            invalid_drafts = invalid_drafts & invalid_drafts.roll(1)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

    @torch.inference_mode()
    def warm_up(self, dtype: torch.dtype, draft_logits: torch.Tensor | None) -> None:
        """Compile what samples the model's own logits; vLLM 0.32 warms up in float32 only.

        Args:
            dtype: of the logits.
            draft_logits: as for a verification.
        """
        device, tokens = self.sampler.req_states.total_len.gpu.device, self.num_speculative_steps
        vocabulary = self.sampler.sampling_states.vocab_size
        # A request with a seed sends its batch through vLLM's filters, of which vLLM warms up both
        # together.
        for count in (1, 2):
            rows = torch.zeros(count, vocabulary, device=device)
            top_k, top_p = torch.ones_like(rows[:, 0], dtype=torch.int32), rows[:, 0] + 0.5
            apply_top_k_top_p(rows, top_k, None)
            apply_top_k_top_p(rows, None, top_p)
        slot = np.zeros(1, dtype=np.int32)
        for drafts, filtered in itertools.product((0, tokens), (True, False)):
            self.parameters.filtered[0] = filtered
            # Of the types of vLLM's: kernels are compiled for them.
            ids = torch.zeros(drafts + 1, dtype=torch.int32, device=device)
            index = positions = ids.long()
            local = torch.arange(drafts + 1, dtype=torch.int32, device=device)
            # Of a head's memory, which vLLM pads: kernels are compiled for its stride.
            logits = torch.zeros(drafts + 1, pad_vocab_size(vocabulary), dtype=dtype, device=device)
            logits = logits[:, :vocabulary]
            if not drafts:
                self.sampler.sample(logits, index, index, slot, positions, ids, local, slot)
                continue
            starts = torch.tensor([0, drafts + 1], dtype=torch.int32, device=device)
            where = positions, starts, index[:1], slot, index, local, slot
            self.warm_up_verification(logits, draft_logits, ids, *where, ids)

    def warm_up_verification(self, *arguments: Any) -> None:
        """Verify one request; arguments as of vLLM's `_verify`."""
        self._verify(*arguments)

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
    ):
        # vLLM verifies a large batch in parts.
        draft_sampled, verify_draft_sampled, pos, idx_mapping, expanded_idx_mapping = map(
            aligned, (draft_sampled, verify_draft_sampled, pos, idx_mapping, expanded_idx_mapping)
        )
        self.verified = expanded_idx_mapping, idx_mapping_np
        where = expanded_idx_mapping, idx_mapping, idx_mapping_np, pos
        processed, is_scaled = self.target_logits(
            logits, *where, draft_sampled, expanded_local_pos, seq_lens_upper_bound_np
        )
        thresholds = self.thresholds(processed, is_scaled, expanded_idx_mapping, idx_mapping_np)
        drafts = draft_logits, verify_draft_sampled, cu_num_logits, idx_mapping, self.longest, pos
        sampled, num_sampled = self.verdict(processed, is_scaled, *drafts, thresholds)
        return processed, sampled, num_sampled

    def _get_logprobs_tensors(
        self, sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
    ):
        """As vLLM's, which under speculation passes over `logprob_token_ids`."""
        index, requests = self.verified
        if not self.most_listed:
            return super()._get_logprobs_tensors(
                sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
            )
        # What adaptive verification has admitted of each request is on the device only.
        adapts = self.enable_adaptive_verification
        starts = cu_num_logits.clone() if adapts else cu_num_logits_np.tolist()
        flat = torch.zeros(len(logits), dtype=sampled.dtype, device=sampled.device)
        _flatten_sampled_kernel[(len(requests),)](
            flat, sampled, sampled.stride(0), num_sampled, cu_num_logits, num_warps=1
        )
        return compute_topk_scores(
            logits,
            max(max_num_logprobs, 0),
            flat,
            starts if len(logits) != len(requests) else None,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=index,
            max_per_req_token_ids=self.most_listed,
            logits_mode=self.sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def target_logits(self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest):
        """(logits with the requests' sampling parameters applied, whether they are applied).

        Where no request needs vLLM's processing they are the model's own.
        """
        if not (self.processed[idx_mapping_np].any() or self.returns_processed):
            return logits, False
        processed = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest
        )
        return processed, True

    def thresholds(self, logits, is_scaled: bool, index, idx_mapping_np) -> torch.Tensor | None:
        """Of the target's rows, None where nothing is left to filter."""
        if is_scaled or not self.parameters.filtered[idx_mapping_np].any():
            return None
        parameters = self.parameters
        return row_thresholds(logits, parameters.temperature, parameters.filters, index=index)

    def draft_rows(
        self, draft_logits: torch.Tensor | None, max_draft_tokens: int
    ) -> torch.Tensor | None:
        """Rows that the draft tokens were drawn from, None for point masses."""
        return draft_logits

    def drafts(self, draft_logits: torch.Tensor | None, idx_mapping: torch.Tensor) -> dict:
        """Arguments of the verifier that say where the drafts of the batch are."""
        temperature = self.parameters.temperature
        kept = self.kept if draft_logits is not None else None
        return {"draft_temperature": temperature, "draft_lse": None if kept is None else kept.lse}

    def verdict(
        self,
        target_logits: torch.Tensor,
        is_scaled: bool,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        max_draft_tokens: int,
        positions: torch.Tensor,
        thresholds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids int64 [B, max_draft_tokens + 1], number of them int32 [B])."""
        temperature, drafts = self.parameters.temperature, self.drafts(draft_logits, idx_mapping)
        options: dict[str, Any] = {
            "temperature": temperature.sign() if is_scaled else temperature,
            "seeds": self.parameters.seeds,
            "draws": self.sampler.req_states.total_len.gpu.long() * DRAWS_PER_LENGTH,
            "level": self.level,
            "positions": positions,
            "thresholds": thresholds,
        }
        result = verify_chain_padded(
            target_logits,
            self.draft_rows(draft_logits, max_draft_tokens),
            draft_sampled,
            cu_num_logits,
            idx_mapping,
            max_draft_tokens=max_draft_tokens,
            method=self.method,
            **options,
            **drafts,
        )
        return self.emitted(result, target_logits, cu_num_logits, idx_mapping, **options)

    def emitted(self, result: ChainResult, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids, number of them) after the verification of the chains."""
        return result.token_ids, result.num_emitted


@REGISTRY.replaces_on_runner(
    f"{_STATES}.add_request",
    "self req_idx sampling_params",
    why="tells requests that need no more than our kernels apply: temperature, top-k, top-p, min-p",
    until="vLLM's kernels apply them",
)
def add_sampling_state(original, sampler: BlockRejectionSampler, req_idx, sampling_params):
    sampler.stock_filtered[req_idx] = original(req_idx, sampling_params)
    sampler.parameters.add_request(req_idx)
    return False


@REGISTRY.replaces_on_runner(
    f"{_SAMPLER}.add_request",
    "self req_idx sampling_params",
    why="remembers requests that need more than our kernels apply, and what they say of drafts",
    until="vLLM's kernels apply temperature, top-k, top-p and min-p",
)
def add_request(original, sampler: BlockRejectionSampler, req_idx, sampling_params):
    original(req_idx, sampling_params)
    needed, parameters = sampler.sampler.needs_logits_processing, sampler.parameters
    sampler.chained[req_idx] = (
        needed[req_idx]
        or sampler.sampler.return_sampling_mask
        or sampling_params.num_logprobs is not None
        or sampling_params.structured_outputs is not None
    )
    prompt_tokens = int(sampler.sampler.req_states.prompt_len.np[req_idx])
    parameters.add_keys(req_idx, prompt_tokens, sampling_params.extra_args)
    filtered = parameters.filtered[req_idx]
    sampler.processed[req_idx] = needed[req_idx] or (filtered and parameters.coupled[req_idx])
    needed[req_idx] |= sampler.stock_filtered[req_idx]


@REGISTRY.replaces_on_runner(
    f"{_SAMPLER}.sample",
    (
        "self logits expanded_idx_mapping idx_mapping idx_mapping_np pos input_ids "
        "expanded_local_pos seq_lens_upper_bound_np return_logprobs"
    ),
    why="draws the token of a step without drafts as a verification does",
    until="vLLM's samplers draw all tokens of a request from one stream of uniforms",
)
def sample(
    original,
    sampler: BlockRejectionSampler,
    logits,
    expanded_idx_mapping,
    idx_mapping,
    idx_mapping_np,
    *rest,
    return_logprobs=False,
):
    rows = logits.shape[0]
    sampler.parameters.copy_changed()
    processed, is_scaled = sampler.target_logits(
        logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest
    )
    token_ids, _ = sampler.verdict(
        processed,
        is_scaled,
        None,
        torch.full((rows,), -1, dtype=torch.int64, device=logits.device),
        torch.arange(rows + 1, dtype=torch.int32, device=logits.device),
        expanded_idx_mapping,
        0,
        rest[0],
        sampler.thresholds(processed, is_scaled, expanded_idx_mapping, idx_mapping_np),
    )
    return token_ids[:, 0], processed
