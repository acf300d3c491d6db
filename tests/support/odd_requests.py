"""Requests at the edge of what vLLM accepts, many without a single token that they may sample."""

from dataclasses import dataclass
from typing import Any

from vllm_hsd.tools.audit.tiny_models import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER)
MAX_MODEL_LEN = 256
PROMPT = TOKENIZER.encode("def f(")
LETTERS = TOKENIZER.convert_tokens_to_ids(list("abcdef"))
A, B = TOKENIZER.convert_tokens_to_ids(["A", "B"])
inf, nan = float("inf"), float("nan")


@dataclass(frozen=True)
class OddRequest:
    params: dict[str, Any]
    prompt: tuple[int, ...] = tuple(PROMPT)
    exact: bool = True  # plain vLLM's answer is not random, and must be equalled
    served: bool = True  # the OpenAI server takes the same parameters over HTTP


def each(key: str, *values: Any) -> dict[str, dict]:
    return {f"{key} {value}": {key: value} for value in values}


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
# vLLM's answer to a row with NaN at temperature 1 depends on the order of a reduction, and it takes
# a +inf, where ours is token 0. test_chain_kernels has ours.
OFFLINE_NOT_FINITE: dict[str, dict] = {
    "logit_bias nan": {"logit_bias": {A: nan}},
    "logit_bias inf": {"logit_bias": {A: inf}},
    "logit_bias inf twice": {"logit_bias": {A: inf, B: inf}},
    "logit_bias 1e39": {"logit_bias": {A: 1e39}},
}
# One token has all the probability, at any temperature.
CERTAIN: dict[str, dict] = {
    **each("min_p", 1.0),
    **each("top_k", 1),
    **each("top_p", 1e-6),
    **each("temperature", 1e-6, 1e-5, 1e-3),
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
    **each("repetition_penalty", 1e-38, 1e-45, 1e38),
    **each("presence_penalty", 2.0, -2.0),
    **each("frequency_penalty", 2.0, -2.0),
    "every penalty": {
        "presence_penalty": -2.0,
        "frequency_penalty": -2.0,
        "repetition_penalty": 1e-3,
    },
    "logit_bias 100": {"logit_bias": {A: 100.0}},
    "logit_bias -100 for all": {"logit_bias": dict.fromkeys(range(VOCABULARY), -100.0)},
    **each("top_k", 10**6),
    **each("seed", 0, 2**63 - 1, -1, -(2**63)),
    **each("max_tokens", 1, 10**9, 0),
    "min_tokens above max_tokens": {"min_tokens": 9, "max_tokens": 8},
    "min_tokens is max_tokens": {"min_tokens": 8, "max_tokens": 8, "ignore_eos": False},
    **each("logprobs", 5, 10**6),
    **each("stop_token_ids", [10**6]),
    "every token stops": {"stop_token_ids": list(range(VOCABULARY))},
    "empty stop string": {"stop": [""]},
    "stop string of 10,000": {"stop": ["z" * 10_000]},
    "many bad words": {"bad_words": list("abcdefghijklmnopqrstuvwxyz")},
    **each("allowed_token_ids", [10**6], [], [-1]),
    **each("logit_bias", {10**6: 1.0}),
    **each("n", 12, 10**6),
    # At 1e-9 vLLM's kernel keeps no token of some rows; which ones, the last bits of logits decide.
    **each("top_p", 0.0, 1e-9),
    **each("min_p", 2.0),
    "a grammar without an end": {"structured_outputs": {"regex": "(ab)*"}, "ignore_eos": False},
    "a grammar whose end is ignored": {"structured_outputs": {"regex": "(ab)*"}},
    "a grammar that forces a text without an end": {
        "structured_outputs": {"grammar": 'root ::= "a" root'}
    },
    "alternatives that part inside a character": {"structured_outputs": {"choice": ["é1", "è2"]}},
    "no grammar": {"structured_outputs": {"regex": "("}},
}
OFFLINE_EXTREME: dict[str, dict] = {
    **each("logit_bias", {A: -inf}, {A: -1e39}, {A: 3e38}),
    **each("prompt_logprobs", 2),
}
TEMPERATURES = each("temperature", 2.0, 1e4, 1e-4, inf, nan, -1.0)
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
