"""vLLM's V1 rejection sampler outside an engine."""

from collections.abc import Callable

import torch

from benchmarks.kernels.drafts import Drafts


def plain_sampling(temperature: torch.Tensor | None, batch: int, device: torch.device | str):
    """vLLM's metadata of a batch with nothing but a temperature, [batch] or None for greedy."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.empty(0, device=device)
    return SamplingMetadata(
        temperature=temperature,
        all_greedy=temperature is None,
        all_random=temperature is not None,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def load_v1() -> Callable[[Drafts], Callable[[], torch.Tensor]]:
    """A function that prepares a batch and returns the call to time.

    Raises:
        ImportError: vLLM does not import here.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    sampler = RejectionSampler(Sampler())

    def prepare(drafts: Drafts) -> Callable[[], torch.Tensor]:
        device = drafts.target.device
        rows = torch.arange(drafts.target.shape[0], device=device)
        is_bonus = rows % (drafts.n + 1) == drafts.n
        lengths = torch.full((drafts.batch,), drafts.n, dtype=torch.int32, device=device)
        spec = SpecDecodeMetadata(
            draft_token_ids=drafts.tokens.to(torch.int32),
            num_draft_tokens=[drafts.n] * drafts.batch,
            cu_num_draft_tokens=lengths.cumsum(0, dtype=torch.int32),
            cu_num_sampled_tokens=(lengths + 1).cumsum(0, dtype=torch.int32),
            target_logits_indices=rows[~is_bonus],
            bonus_logits_indices=rows[is_bonus],
            logits_indices=rows,
        )
        temperature = drafts.temperature[0].item()
        greedy = temperature == 0
        sampling = plain_sampling(None if greedy else drafts.temperature, drafts.batch, device)
        # V1's drafter returns probabilities: they are computed before the timed call.
        probs = None if greedy else (drafts.draft.float() / temperature).softmax(-1)

        def call() -> torch.Tensor:
            return sampler(spec, probs, drafts.target, sampling).sampled_token_ids

        return call

    return prepare
