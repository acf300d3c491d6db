"""The target's sampler on vLLM's V2 runner: our Triton verifier under vLLM's own drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_hsd.core.schedule import DRAWS_PER_LENGTH
from vllm_hsd.errors import UserError
from vllm_hsd.kernels.chain_verify import verify_chain_padded
from vllm_hsd.registry import NONE_FILED
from vllm_hsd.runner_v2.hooks import REGISTRY, RUNNER, replace_on
from vllm_hsd.runner_v2.speculator import CascadeSpeculator
from vllm_hsd.runner_v2.stock_drafters import KeptDrafts

_SAMPLER = "vllm.v1.worker.gpu.sample.sampler.Sampler"
_STATES = "vllm.v1.worker.gpu.sample.states.SamplingStates"


def serve(runner: Any) -> None:
    """Put our verifier into a V2 model runner that has loaded its models.

    Raises:
        UserError: the runner samples in a way that our verifier does not know.
    """
    sampler, stock = runner.sampler, runner.rejection_sampler
    if sampler is None or stock is None:
        return  # a pipeline stage that does not sample
    if type(sampler).__name__ != "Sampler" or type(stock) is not RejectionSampler:
        raise UserError(
            "rejection_sample_method 'hierarchical' works with vLLM's own samplers, not with "
            f"{type(sampler).__name__} and {type(stock).__name__}: remove it, or watermarking."
        )
    if runner.batch_sharder is not None:
        raise UserError(
            "rejection_sample_method 'hierarchical' does not work with enable_batch_sharded_"
            "sampling: remove one of them."
        )
    speculator, kept = runner.speculator, None
    if isinstance(speculator, CascadeSpeculator):
        speculator.req_states = runner.req_states
        replace_on(runner, f"{RUNNER}.sample_tokens", by=speculator)
        runner.rejection_sampler = CascadeRejectionSampler(
            sampler, runner.speculative_config, runner.device, speculator
        )
        return
    if speculator.draft_logits is not None:
        drafted, vocabulary = speculator.draft_logits.shape[-1], runner.vocab_size
        if drafted != vocabulary:
            raise UserError(
                f"the drafter's vocabulary has {drafted} entries, the target's {vocabulary}: set "
                "draft_sample_method to 'greedy', which needs no probabilities of the drafter."
            )
        kept = KeptDrafts(speculator, runner.req_states)
    runner.rejection_sampler = BlockRejectionSampler(
        sampler, runner.speculative_config, runner.device, kept
    )


class BlockRejectionSampler(RejectionSampler):
    """Block verification by our kernels; log-probabilities and all else are vLLM's.

    Steps without drafts draw from the same uniforms, so that a seeded request's text does not
    depend on what other requests of the batch do.

    Args:
        sampler: vLLM's sampler; three of its methods are replaced.
        spec_config: the configuration.
        device: of the model.
        kept: the drafter's logsumexps, None if its draft tokens are point masses.
    """

    # Stream of the target's uniforms (see verify.rng) and the rule.
    level, method = 1, "block"

    def __init__(self, sampler, spec_config, device, kept: KeptDrafts | None) -> None:
        super().__init__(sampler, spec_config, device)
        self.kept = kept
        self.processed_logprobs = sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES
        # Requests whose logits change by more than a temperature.
        self.processed = np.zeros_like(sampler.needs_logits_processing)
        replace_on(sampler.sampling_states, f"{_STATES}.add_request", by=self)
        replace_on(sampler, f"{_SAMPLER}.add_request", f"{_SAMPLER}.sample", by=self)

    def __call__(self, logits, input_batch, draft_logits=None, invalid_drafts=None):
        """As vLLM's; a draft token that a grammar refuses is verified before the draft ends.

        The grammar gives its row a mask that allows it nothing, so it is rejected, and the next
        token follows from the residual. Ending the draft before it would draw from the target's
        row instead, which is not lossless for a sampled draft.
        """
        if invalid_drafts is not None:
            invalid_drafts = invalid_drafts & invalid_drafts.roll(1)
        return super().__call__(logits, input_batch, draft_logits, invalid_drafts)

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
        processed, is_scaled = self.target_logits(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        sampled, num_sampled = self.verify(
            processed,
            is_scaled,
            draft_logits,
            verify_draft_sampled,
            cu_num_logits,
            idx_mapping,
            self.num_speculative_steps,
        )
        return processed, sampled, num_sampled

    def target_logits(self, logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest):
        """(logits with the requests' sampling parameters applied, whether by temperature too).

        Where no request asks for more than a temperature they are the model's own.
        """
        if not (self.processed[idx_mapping_np].any() or self.processed_logprobs):
            return logits, False
        processed = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest
        )
        return processed, True

    def draft_rows(
        self, draft_logits: torch.Tensor | None, max_draft_tokens: int
    ) -> torch.Tensor | None:
        """Rows that the draft tokens were drawn from, None for point masses."""
        return draft_logits

    def drafts(self, draft_logits: torch.Tensor | None, idx_mapping: torch.Tensor) -> dict:
        """Arguments of the verifier that say where the drafts of the batch are."""
        temperature = self.sampler.sampling_states.temperature.gpu
        kept = self.kept if draft_logits is not None else None
        return {
            "draft_temperature": temperature,
            "draft_lse": None if kept is None else kept.lse,
        }

    def verify(
        self,
        target_logits: torch.Tensor,
        is_scaled: bool,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        max_draft_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids int64 [B, max_draft_tokens + 1], number of them int32 [B])."""
        states = self.sampler.sampling_states
        temperature = states.temperature.gpu
        result = verify_chain_padded(
            target_logits,
            self.draft_rows(draft_logits, max_draft_tokens),
            draft_sampled,
            cu_num_logits,
            idx_mapping,
            temperature.sign() if is_scaled else temperature,
            states.seeds.gpu,
            self.sampler.req_states.total_len.gpu.long() * DRAWS_PER_LENGTH,
            max_draft_tokens=max_draft_tokens,
            level=self.level,
            method=self.method,
            **self.drafts(draft_logits, idx_mapping),
        )
        return result.token_ids, result.num_emitted


class CascadeRejectionSampler(BlockRejectionSampler):
    """Verification of a cascade's drafts, which are in the order of the last proposal's batch."""

    def __init__(self, sampler, spec_config, device, speculator: CascadeSpeculator) -> None:
        super().__init__(sampler, spec_config, device, None)
        self.speculator = speculator
        self.level, self.method = speculator.schedule.num_levels, speculator.hsd.verifier

    def draft_rows(self, draft_logits, max_draft_tokens):
        if max_draft_tokens == 0:
            return None
        return self.speculator.state.rows[-1]

    def drafts(self, draft_logits, idx_mapping) -> dict:
        state, speculator = self.speculator.state, self.speculator
        temperature = self.sampler.sampling_states.temperature.gpu
        return {
            "draft_temperature": temperature * speculator.scales[-1],
            "draft_lse": None if state.rows[-1] is None else state.lse[-1],
            "draft_index": state.row_of_slot[idx_mapping.long()],
            "draft_length": state.draft_length,
        }


@REGISTRY.replaces_on_runner(
    f"{_STATES}.add_request",
    ("self", "req_idx", "sampling_params"),
    why="tells requests that need no more than a temperature, which our kernels apply",
    until="vLLM's kernels apply the temperature",
    issue=NONE_FILED,
)
def add_sampling_state(original, sampler: BlockRejectionSampler, req_idx, sampling_params):
    original(req_idx, sampling_params)
    states = sampler.sampler.sampling_states
    return bool(
        states.temperature.np[req_idx] != 0
        and (
            states.min_p.np[req_idx] != 0
            or states.top_k.np[req_idx] != states.vocab_size
            or states.top_p.np[req_idx] != 1
        )
    )


@REGISTRY.replaces_on_runner(
    f"{_SAMPLER}.add_request",
    ("self", "req_idx", "sampling_params"),
    why="remembers requests that need more than a temperature",
    until="vLLM's kernels apply the temperature",
    issue=NONE_FILED,
)
def add_request(original, sampler: BlockRejectionSampler, req_idx, sampling_params):
    original(req_idx, sampling_params)
    needed = sampler.sampler.needs_logits_processing
    sampler.processed[req_idx] = needed[req_idx]
    temperature = sampler.sampler.sampling_states.temperature.np[req_idx]
    needed[req_idx] |= temperature not in (0, 1)


@REGISTRY.replaces_on_runner(
    f"{_SAMPLER}.sample",
    (
        "self",
        "logits",
        "expanded_idx_mapping",
        "idx_mapping",
        "idx_mapping_np",
        "pos",
        "input_ids",
        "expanded_local_pos",
        "seq_lens_upper_bound_np",
        "return_logprobs",
    ),
    why="draws the token of a step without drafts from the uniforms of a verification",
    until="vLLM's samplers draw all tokens of a request from one stream of uniforms",
    issue=NONE_FILED,
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
    processed, is_scaled = sampler.target_logits(
        logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *rest
    )
    token_ids, _ = sampler.verify(
        processed,
        is_scaled,
        None,
        torch.full((rows,), -1, dtype=torch.int64, device=logits.device),
        torch.arange(rows + 1, dtype=torch.int32, device=logits.device),
        expanded_idx_mapping,
        0,
    )
    return token_ids[:, 0], processed
