"""An engine without speculation that is made to generate given texts, and scores their tokens.

The engine computes its own next-token distribution at every place, with all that its sampler
applies (masks, grammars, penalties, temperature, min-p, top-k, top-p), and then gets the text's
token instead of a drawn one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit.directions import ROW_WIDTH, marks, rows_of
from vllm_hsd.tools.audit.quantiles import token_ranges
from vllm_hsd.tools.engine import Ids, Params, lora_request, vllm_params

# Key of a request's text in its `extra_args`.
_TEXT = "vllm_hsd_text"
# Where top_k and top_p are in the arguments of `Draw` after the logits.
_FILTERS = slice(3, 5)

# vLLM's last part of sampling: (token ids [n], logits) for logits [n, V] after temperature and
# min-p, slot [n] of each row, the same on the host, positions [n] of the rows' input tokens, top_k
# and top_p ([n] or None).
Draw = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# What is noted of every token: [n, ...] for the sampler's `Draw`, its arguments, the texts' token
# ids [n], and (text, place) of each.
Note = Callable[[Draw, tuple[Any, ...], torch.Tensor, list[tuple[int, int]]], np.ndarray]


class TextSampler:
    """Takes the place of the last part of a V2 runner's sampler, until it is removed.

    Attributes:
        draw: what it takes the place of.
        note: what is kept of every token.
        texts: slot -> number and token ids of its request's text.
        notes: number of the text -> what was noted of each token.
    """

    def __init__(self, sampler: Any, note: Note) -> None:
        self.sampler, self.note, self.draw = sampler, note, sampler._sample_random
        self.texts: dict[int, tuple[int, list[int]]] = {}
        self.notes: dict[int, list[np.ndarray]] = {}
        sampler._sample_random, sampler.add_request = self._sample, self._add_request

    def remove(self) -> None:
        del self.sampler._sample_random, self.sampler.add_request

    def _add_request(self, slot: int, sampling_params: Any) -> None:
        number, *text = sampling_params.extra_args[_TEXT]
        self.texts[slot] = number, text
        type(self.sampler).add_request(self.sampler, slot, sampling_params)

    def _sample(
        self, logits: torch.Tensor, index: torch.Tensor, slots: np.ndarray, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next token of every request's text; arguments as of `Draw`."""
        texts = [self.texts[slot] for slot in slots.tolist()]
        # After the end of a text the batch may still hold it: the last place once more.
        places = [
            min(len(self.notes.setdefault(number, [])), len(text) - 1) for number, text in texts
        ]
        token_ids = torch.tensor(
            [text[i] for (_, text), i in zip(texts, places, strict=True)], device=logits.device
        )
        where = [(number, i) for (number, _), i in zip(texts, places, strict=True)]
        found = self.note(self.draw, (logits, index, slots, *rest), token_ids, where)
        # The sample of a prompt's chunk, after which more of the prompt is there, is thrown away.
        ends = self.sampler.req_states.total_len.gpu[index.long()] - 1
        used = (rest[0] == ends).tolist()
        for (number, _), row, is_used in zip(texts, found, used, strict=True):
            if is_used:
                self.notes[number].append(row)
        return token_ids, logits


def drawn_with_raised(
    llm: Any, prompts: Ids, texts: Ids, sampling_params: Params, bound: float
) -> list[int]:
    """What is drawn in the place of each text's last token if its logit is raised by a bound.

    Arguments and errors as for `score`; every request has a seed.

    Args:
        bound: nats, before the temperature.
    """

    def note(draw, arguments, token_ids, where) -> np.ndarray:
        logits, *others = arguments
        raised = [bound / sampling_params[number]["temperature"] for number, _ in where]
        amounts = torch.tensor(raised, device=logits.device)
        logits = logits.float().scatter_add(1, token_ids[:, None], amounts[:, None])
        return draw(logits, *others)[0].cpu().numpy()

    found, _ = _noted(llm, prompts, texts, sampling_params, note, seeded=True)
    return [int(drawn[-1]) for drawn in found]


def shortfalls(llm: Any, prompts: Ids, texts: Ids, sampling_params: Params) -> list[float]:
    """By how many nats each text's last token falls short of the likeliest one, before temperature.

    Arguments and errors as for `score`; the parameters are greedy.
    """

    def note(_, arguments, token_ids, __) -> np.ndarray:
        logits = arguments[0].float()
        return (logits.max(-1).values - logits.gather(1, token_ids[:, None])[:, 0]).cpu().numpy()

    return [float(own[-1]) for own in _noted(llm, prompts, texts, sampling_params, note)[0]]


def score(
    llm: Any,
    prompts: Ids,
    texts: Ids,
    sampling_params: Params,
    rows: Mapping[str, Sequence[np.ndarray]] | None = None,
) -> tuple[list[np.ndarray], list[str]]:
    """Where every token of the texts lies in the engine's own distribution.

    Runs in the process of an engine without speculation, on vLLM's V2 runner, else UserError.

    Args:
        prompts, texts: token ids.
        sampling_params: arguments of `vllm.SamplingParams` of every text, not greedy.
        rows: [tokens, 2, k] of every text by drafter, see `directions.rows_of`.

    Returns:
        [tokens, FIGURES + drafters * directions.WIDTH] float64 for every text, see `token_ranges`
        and `directions.marks`, up to where the engine ends the text, and why it does.
    """
    drafters = list((rows or {}).values())

    def note(_, arguments, token_ids, where) -> np.ndarray:
        logits = _filtered(*arguments)
        found = [token_ranges(logits, token_ids).numpy()]
        probs = logits.float().softmax(-1) if drafters else logits
        for own in drafters:
            at = np.stack([own[number][place] for number, place in where])
            found.append(marks(probs, token_ids, at))
        return np.concatenate(found, 1)

    return _noted(llm, prompts, texts, sampling_params, note)


def likeliest(llm: Any, prompts: Ids, texts: Ids, sampling_params: Params) -> list[np.ndarray]:
    """The engine's own distributions at every token of the texts: `directions.rows_of` each.

    Arguments and errors as for `score`. None of a text whose prompt fills the engine's context.
    """

    def note(_, arguments, *__) -> np.ndarray:
        return rows_of(_filtered(*arguments))

    fit = [len(prompt) < llm.model_config.max_model_len for prompt in prompts]

    def fitting(given: Any) -> Any:
        return list(itertools.compress(given, fit))

    read = fitting(prompts), fitting(texts), fitting(sampling_params)
    found, none = iter(_noted(llm, *read, note)[0]), np.empty((0, 2, ROW_WIDTH), np.float32)
    return [next(found) if fits else none for fits in fit]


def _noted(
    llm: Any, prompts: Ids, texts: Ids, sampling_params: Params, note: Note, seeded: bool = False
) -> tuple[list[np.ndarray], list[str]]:
    """What was noted of the tokens of every text, up to its end, and the engine's reason for it."""
    params = [
        vllm_params(
            llm,
            {
                **given,
                "seed": given["seed"] if seeded else None,
                "max_tokens": len(text),
                # vLLM refuses more than the whole text, which masks no more of it.
                "min_tokens": min(given.get("min_tokens", 0), len(text)),
                "extra_args": {_TEXT: [number, *text]},
            },
        )
        for number, (text, given) in enumerate(zip(texts, sampling_params, strict=True))
    ]
    llm.collective_rpc(partial(_install, note=note))
    try:
        requests: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        adapters = [lora_request(given) for given in sampling_params]
        outputs = llm.generate(requests, params, use_tqdm=False, lora_request=adapters)
    finally:
        found = llm.collective_rpc(_remove)[0]
    ends = [output.outputs[0] for output in outputs]
    # After its end the batch may hold a text for a step.
    noted = [np.array(found[i][: len(end.token_ids)]) for i, end in enumerate(ends)]
    return noted, [end.finish_reason or "" for end in ends]


def _filtered(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    # As the kernels on a CPU, it may write into what it is given.
    return apply_top_k_top_p(logits.float(), *others[_FILTERS])


def _install(worker: Any, note: Note) -> None:
    runner = worker.model_runner
    sampler: Any = getattr(runner, "sampler", None)
    if not hasattr(sampler, "sampling_states") or runner.speculator is not None:
        raise UserError(
            "texts can be scored only on vLLM's V2 runner, without speculation: unset "
            "VLLM_USE_V2_MODEL_RUNNER."
        )
    runner.vllm_hsd_texts = TextSampler(sampler, note)


def _remove(worker: Any) -> dict[int, list[np.ndarray]]:
    texts = worker.model_runner.vllm_hsd_texts
    texts.remove()
    del worker.model_runner.vllm_hsd_texts
    return texts.notes
