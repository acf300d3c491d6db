"""What a request says of its drafts, in `extra_args` or OpenAI's `vllm_xargs`.

`hsd_prediction` is text or token ids that the answer will mostly be, `hsd_num_tokens` the most
tokens of a draft. The front end checks both and has the tokenizer; the worker gets token ids.
"""

from __future__ import annotations

from typing import Any

from vllm_hsd.errors import UserError, quoted
from vllm_hsd.host.hooks import REGISTRY

PREDICTION, NUM_TOKENS = "hsd_prediction", "hsd_num_tokens"
KEYS = {PREDICTION, NUM_TOKENS}
_PREFIX = "hsd_"
_CONFIG = '{"prediction": {}}'


def keys_of(speculation: Any) -> set[str]:
    """The keys that requests may have under a speculative configuration of vLLM, or None."""
    hsd, lowest = getattr(speculation, "hsd", None), getattr(speculation, "hsd_sources", None)
    if hsd is not None:
        lowest = hsd.levels[0]
    if lowest is None:
        return set()
    predicts = any(source.kind == "prediction" for source in lowest.drafters)
    return KEYS if predicts else {NUM_TOKENS}


def read_keys(
    keys: dict[str, Any], speculation: Any, model_config: Any, tokenizer: Any
) -> dict[str, Any]:
    """The keys of ours among a request's, with token ids for a text.

    Args:
        keys: the request's `extra_args`.
        speculation: vLLM's speculative configuration.
        model_config: vLLM's, of the target.
        tokenizer: of the target; None where vLLM was started without.

    Raises:
        UserError: an unknown key, a wrong value, or one that the server cannot serve.
    """
    given = {key: value for key, value in keys.items() if key.startswith(_PREFIX)}
    if unknown := sorted(given.keys() - KEYS):
        raise UserError(
            f"{quoted(unknown[0])} is no key of a request: there are {PREDICTION} and {NUM_TOKENS}."
        )
    known = keys_of(speculation)
    if given and not known:
        raise UserError(
            f"{next(iter(given))}: vLLM's own drafter serves here: remove the key, or put the "
            "drafter into `sources`."
        )
    if NUM_TOKENS in given:
        value = given[NUM_TOKENS]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise UserError(
                f"{NUM_TOKENS} is {quoted(value)}: give the most tokens of a draft, 0 for none."
            )
    if PREDICTION in given:
        if PREDICTION not in known:
            raise UserError(
                f"{PREDICTION}, or `prediction` of OpenAI's chat API: no source of this server "
                f"drafts from it: remove it, or add {_CONFIG} to the sources of the lowest level."
            )
        given[PREDICTION] = _token_ids(given[PREDICTION], model_config, tokenizer)
    return given


def _token_ids(value: object, model_config: Any, tokenizer: Any) -> list[int]:
    if isinstance(value, str):
        if tokenizer is None:
            raise UserError(f"{PREDICTION} is text and vLLM has no tokenizer: give token ids.")
        most = model_config.max_model_len * tokenizer.max_chars_per_token
        if len(value) > most:
            # Before it is tokenized, which takes as long as it is.
            raise UserError(
                f"{PREDICTION} has {len(value)} characters, and max_model_len="
                f"{model_config.max_model_len} tokens have {most} at most: give fewer."
            )
        value = tokenizer.encode(value, add_special_tokens=False)
    numbers = isinstance(value, list | tuple) and all(type(token) is int for token in value)
    if not numbers:
        raise UserError(f"{PREDICTION} is {quoted(value)}: give text or a list of token ids.")
    tokens: list[int] = list(value)  # type: ignore[call-overload]
    if len(tokens) > model_config.max_model_len:
        raise UserError(
            f"{PREDICTION} has {len(tokens)} tokens and max_model_len is "
            f"{model_config.max_model_len}: give fewer."
        )
    size = model_config.get_vocab_size()
    if outside := [token for token in tokens if not 0 <= token < size]:
        raise UserError(
            f"{PREDICTION} has token {quoted(outside[0])}, outside the vocabulary of {size}: use "
            "the target's tokenizer."
        )
    return tokens


@REGISTRY.replaces(
    "vllm.v1.engine.input_processor.InputProcessor.process_inputs",
    (
        "self request_id prompt params supported_tasks arrival_time lora_request "
        "tokenization_kwargs trace_headers priority data_parallel_rank resumable "
        "session_id kv_hints"
    ),
    why="checks what a request says of its drafts where its tokenizer is",
    until="vLLM has a field for predicted outputs and for the draft length of a request",
    issue="vllm-project/vllm#10137",
)
def process_inputs(original, self, request_id, prompt, params, *args, **kwargs):
    speculation, keys = self.speculative_config, getattr(params, "extra_args", None) or {}
    checked = {}
    if hasattr(speculation, "hsd_couples_all"):
        checked = read_keys(keys, speculation, self.model_config, self.tokenizer)
    request = original(self, request_id, prompt, params, *args, **kwargs)
    if checked:
        # The caller's own mapping stays as it is.
        request.sampling_params.extra_args = {**keys, **checked}
    return request


@REGISTRY.replaces(
    "vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest.to_sampling_params",
    "self max_tokens default_sampling_params",
    why="reads the field `prediction` of OpenAI's chat API, which vLLM passes over",
    until="vLLM reads it",
    issue="vllm-project/vllm#10137",
)
def to_sampling_params(original, self, *args, **kwargs):
    params = original(self, *args, **kwargs)
    predicted = (self.model_extra or {}).get("prediction")
    if predicted is not None:
        params.extra_args = {PREDICTION: _content(predicted), **(params.extra_args or {})}
    return params


def _content(predicted: Any) -> object:
    """The text of `{"type": "content", "content": text or parts with texts}`."""
    content = predicted.get("content") if isinstance(predicted, dict) else predicted
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        known = [text for text in texts if isinstance(text, str)]
        return "".join(known) if len(known) == len(content) else content
    return content
