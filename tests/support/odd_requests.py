"""Requests at the edge of what vLLM accepts, many without a single token that they may sample.

The table is shared by the comparison with a plain engine and by the soak on the server.
"""

from dataclasses import dataclass
from typing import Any

from support.tiny_models import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER)
MAX_MODEL_LEN = 256
PROMPT = TOKENIZER.encode("def f(")
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdef"))
A, B = TOKENIZER.convert_tokens_to_ids(["A", "B"])
inf, nan = float("inf"), float("nan")


@dataclass(frozen=True)
class OddRequest:
    """One request of the table.

    Attributes:
        exact: plain vLLM's answer does not depend on random numbers and must be equalled.
        served: the OpenAI server takes the same parameters over HTTP.
    """

    params: dict[str, Any]
    prompt: tuple[int, ...] = tuple(PROMPT)
    exact: bool = True
    served: bool = True


# At temperature 0 and 1. The first groups leave nothing to sample, so the answer is vLLM's
# fallback at both temperatures.
UNSAMPLABLE: dict[str, dict] = {
    "one token allowed and forbidden": {"allowed_token_ids": [A], "bad_words": ["A"]},
    # One allowed token: with two the first one would be random, if rarely.
    "nothing left after one token": {"allowed_token_ids": [A], "bad_words": ["AA"]},
    "nothing but stop tokens before min_tokens": {
        "allowed_token_ids": [A, B],
        "stop_token_ids": [A, B],
        "min_tokens": 4,
    },
    "nothing but the end before min_tokens": {
        "allowed_token_ids": [EOS],
        "min_tokens": 4,
        "ignore_eos": False,
    },
    "forbidden, with logprobs": {"allowed_token_ids": [A], "bad_words": ["A"], "logprobs": 3},
}
OFFLINE_UNSAMPLABLE: dict[str, dict] = {
    "every logit biased to -inf": {"logit_bias": dict.fromkeys(range(VOCABULARY), -inf)},
}
# vLLM's answer to a row with NaN or +inf depends on the platform at temperature 1: softmax and
# token 0 on a GPU, a sampler that passes over NaN on a CPU. test_chain_kernels compares ours.
OFFLINE_NOT_FINITE: dict[str, dict] = {
    "logit_bias nan": {"logit_bias": {A: nan}},
    "logit_bias inf": {"logit_bias": {A: inf}},
    "logit_bias inf twice": {"logit_bias": {A: inf, B: inf}},
    "logit_bias 1e39": {"logit_bias": {A: 1e39}},
}
# One token has all the probability, at any temperature.
CERTAIN: dict[str, dict] = {
    "min_p 1": {"min_p": 1.0},
    "top_k 1": {"top_k": 1},
    "top_p 1e-6": {"top_p": 1e-6},
    "temperature 1e-6": {"temperature": 1e-6},
    "temperature 1e-5": {"temperature": 1e-5},
    "temperature 1e-3": {"temperature": 1e-3},
    "one token allowed": {"allowed_token_ids": [A]},
    "one choice": {"structured_outputs": {"choice": ["abba"]}, "ignore_eos": False},
    "one string matches": {"structured_outputs": {"regex": "xyz"}, "ignore_eos": False},
    "one choice, of another alphabet": {
        "structured_outputs": {"choice": ["abc"]},
        "allowed_token_ids": [A],
        "ignore_eos": False,
    },
}
# Extreme numbers; some overflow to inf or nan and some do not, the answer is random.
EXTREME: dict[str, dict] = {
    "repetition_penalty 1e-38": {"repetition_penalty": 1e-38},
    "repetition_penalty 1e-45": {"repetition_penalty": 1e-45},
    "repetition_penalty 1e38": {"repetition_penalty": 1e38},
    "presence_penalty 2": {"presence_penalty": 2.0},
    "presence_penalty -2": {"presence_penalty": -2.0},
    "frequency_penalty 2": {"frequency_penalty": 2.0},
    "frequency_penalty -2": {"frequency_penalty": -2.0},
    "every penalty": {
        "presence_penalty": -2.0,
        "frequency_penalty": -2.0,
        "repetition_penalty": 1e-3,
    },
    "logit_bias 100": {"logit_bias": {A: 100.0}},
    "logit_bias -100 for all": {"logit_bias": dict.fromkeys(range(VOCABULARY), -100.0)},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "seed 0": {"seed": 0},
    "seed 2**63 - 1": {"seed": 2**63 - 1},
    "seed -1": {"seed": -1},
    "seed -2**63": {"seed": -(2**63)},
    "one token": {"max_tokens": 1},
    "no end": {"max_tokens": 10**9},
    "no tokens": {"max_tokens": 0},
    "min_tokens above max_tokens": {"min_tokens": 9, "max_tokens": 8},
    "min_tokens is max_tokens": {"min_tokens": 8, "max_tokens": 8, "ignore_eos": False},
    "logprobs": {"logprobs": 5},
    "more logprobs than allowed": {"logprobs": 10**6},
    "unknown stop token": {"stop_token_ids": [10**6]},
    "every token stops": {"stop_token_ids": list(range(VOCABULARY))},
    "empty stop string": {"stop": [""]},
    "stop string of 10,000": {"stop": ["z" * 10_000]},
    "many bad words": {"bad_words": list("abcdefghijklmnopqrstuvwxyz")},
    "unknown tokens allowed": {"allowed_token_ids": [10**6]},
    "no tokens allowed": {"allowed_token_ids": []},
    "negative token allowed": {"allowed_token_ids": [-1]},
    "bias of an unknown token": {"logit_bias": {10**6: 1.0}},
    "several answers": {"n": 12},
    "too many answers": {"n": 10**6},
    "top_p 0": {"top_p": 0.0},
    # vLLM's kernel keeps no token of some rows; which ones, the last bits of logits decide.
    "top_p 1e-9": {"top_p": 1e-9},
    "min_p 2": {"min_p": 2.0},
    "a grammar without an end": {
        "structured_outputs": {"regex": "(ab)*"},
        "ignore_eos": False,
    },
    "a grammar whose end is ignored": {"structured_outputs": {"regex": "(ab)*"}},
    "no grammar": {"structured_outputs": {"regex": "("}},
}
OFFLINE_EXTREME: dict[str, dict] = {
    "logit_bias -inf": {"logit_bias": {A: -inf}},
    "logit_bias -1e39": {"logit_bias": {A: -1e39}},
    "logit_bias 3e38": {"logit_bias": {A: 3e38}},
    "prompt logprobs": {"prompt_logprobs": 2},
}
# Temperatures of their own.
TEMPERATURES: dict[str, dict] = {
    "temperature 2": {"temperature": 2.0},
    "temperature 1e4": {"temperature": 1e4},
    "temperature 1e-4": {"temperature": 1e-4},
    "temperature inf": {"temperature": inf},
    "temperature nan": {"temperature": nan},
    "temperature -1": {"temperature": -1.0},
}
PROMPTS: dict[str, tuple[int, ...]] = {
    "no prompt": (),
    "one token of prompt": (0,),
    "prompt of the end": (EOS,),
    "prompt of max_model_len - 2": tuple((7 * i) % 256 + 3 for i in range(MAX_MODEL_LEN - 2)),
    "prompt of max_model_len - 1": tuple((5 * i) % 256 + 3 for i in range(MAX_MODEL_LEN - 1)),
    "prompt of max_model_len": tuple((5 * i) % 256 + 3 for i in range(MAX_MODEL_LEN)),
    "unknown token in the prompt": (5, 10**6, 7),
}


def table() -> dict[str, OddRequest]:
    """Name -> request."""
    base = {"max_tokens": 8, "ignore_eos": True}
    found: dict[str, OddRequest] = {}
    for group, exact, served in (
        (UNSAMPLABLE, True, True),
        (OFFLINE_UNSAMPLABLE, True, False),
        (CERTAIN, True, True),
        (OFFLINE_NOT_FINITE, False, False),
        (EXTREME, False, True),
        (OFFLINE_EXTREME, False, False),
    ):
        for name, params in group.items():
            for temperature in (0, 1):
                given = {**base, "temperature": temperature, "seed": 11, **params}
                # Which token's logit is NaN at temperature 0 is the platform's choice, too.
                certain = exact or (temperature == 0 and name != "logit_bias nan")
                odd = OddRequest(given, exact=certain, served=served)
                found[f"{name}, temperature {temperature}"] = odd
    for name, params in TEMPERATURES.items():
        found[name] = OddRequest({**base, **params}, exact=False, served=False)
    for name, prompt in PROMPTS.items():
        for temperature in (0, 1):
            params = {**base, "temperature": temperature}
            found[f"{name}, temperature {temperature}"] = OddRequest(
                params, prompt, exact=temperature == 0
            )
    return found
