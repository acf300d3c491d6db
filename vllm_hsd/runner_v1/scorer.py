"""An engine without speculation that is made to generate given texts, and scores their tokens.

The engine computes its own next-token distribution at every place, with all that its sampler
applies (masks, grammars, penalties, temperature, min-p, top-k, top-p), and then gets the text's
token instead of a drawn one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_hsd.engine import vllm_params
from vllm_hsd.errors import UserError
from vllm_hsd.lossless.quantiles import token_ranges

# Key of a request's text in its `extra_args`.
_TEXT = "vllm_hsd_text"


class TextSampler:
    """Takes the place of the last part of the sampler of one V1 runner.

    Attributes:
        replaced: what the runner samples with otherwise.
        ranges: number of the text -> [3] float64 per token, see `token_ranges`.
    """

    def __init__(self, runner: Any, replaced: Any) -> None:
        self.runner, self.replaced = runner, replaced
        self.ranges: dict[int, list[np.ndarray]] = {}

    def __call__(
        self,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, None]:
        """The next token of every request's text.

        Args:
            logits: [batch, V] float32 after temperature and min-p.
            generators: unused.
            top_k, top_p: [batch] or None.
        """
        input_batch = self.runner.input_batch
        texts, places = [], []
        for request_id in input_batch.req_ids[: len(logits)]:
            number, *text = self.runner.requests[request_id].sampling_params.extra_args[_TEXT]
            texts.append((number, text))
            places.append(len(self.ranges.setdefault(number, [])))
        token_ids = torch.tensor(
            [text[min(i, len(text) - 1)] for (_, text), i in zip(texts, places, strict=True)],
            device=logits.device,
        )
        found = token_ranges(apply_top_k_top_p(logits, top_k, top_p), token_ids).numpy()
        # The sample of a prompt's chunk is thrown away.
        discarded = self.runner.discard_request_mask.np[: len(texts)]
        for (number, _), row, unused in zip(texts, found, discarded, strict=True):
            if not unused:
                self.ranges[number].append(row)
        return token_ids, None


def score(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    sampling_params: Sequence[Mapping[str, Any]],
) -> list[np.ndarray]:
    """Where every token of the texts lies in the engine's own distribution.

    Runs in the process of an engine without speculation, on vLLM's V1 runner.

    Args:
        prompts, texts: token ids.
        sampling_params: arguments of `vllm.SamplingParams` of every text, not greedy.

    Returns:
        [tokens, 3] float64 for every text, see `token_ranges`.

    Raises:
        UserError: the engine does not run on the V1 runner.
    """
    params = [
        vllm_params(
            llm,
            {
                **given,
                "seed": None,
                "max_tokens": len(text),
                "extra_args": {_TEXT: [number, *text]},
            },
        )
        for number, (text, given) in enumerate(zip(texts, sampling_params, strict=True))
    ]
    llm.collective_rpc(_install)
    try:
        requests: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        llm.generate(requests, params, use_tqdm=False)
    finally:
        found = llm.collective_rpc(_remove)[0]
    return [np.array(found[number]) for number in range(len(texts))]


def _install(worker: Any) -> None:
    sampler: Any = getattr(worker.model_runner, "sampler", None)
    if not hasattr(sampler, "topk_topp_sampler") or not hasattr(worker.model_runner, "requests"):
        raise UserError("texts can be scored only on vLLM's V1 runner (VLLM_USE_V2_MODEL_RUNNER=0)")
    drawing = sampler.topk_topp_sampler
    drawing.forward = TextSampler(worker.model_runner, drawing.forward)


def _remove(worker: Any) -> dict[int, list[np.ndarray]]:
    """Put the sampler back; what was found."""
    drawing = worker.model_runner.sampler.topk_topp_sampler
    texts = drawing.forward
    drawing.forward = texts.replaced
    return texts.ranges
