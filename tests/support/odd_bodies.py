"""Bodies for /v1/completions that a client may send, sensible or not.

Most of them leave an answer that is not random: a server with a cascade must answer what a plain
one does, status and choices alike.
"""

import json
import random
from typing import Any

from support.odd_requests import LETTERS, VOCABULARY

BASE: dict[str, Any] = {
    "model": "tiny",
    "prompt": "def f(",
    "max_tokens": 8,
    "temperature": 0,
    "return_token_ids": True,
}
# Bytes that are no request at all.
RAW: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "null": b"null",
    "binary": bytes(range(256)),
    "NaN": json.dumps({**BASE, "temperature": float("nan")}).encode(),
    "infinity": json.dumps({**BASE, "top_p": float("inf")}).encode(),
    "deep nesting": b'{"prompt":' + b"[" * 100_000,
    "a long number": b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "a key twice": json.dumps(BASE).encode()[:-1] + b', "temperature": 0}',
}
# Values for every field of a request, whatever its type.
JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 10**9, -(10**9), 2**31, 2**63 - 1, 2**63, 10**30),
    *(0.0, 0.5, -0.5, 1e-45, 1e-9, 1e39, 1e308, -0.0),
    *("", "a", "0", "-1", "1e3", "a" * 10_000, "\0"),
    *([], [0], [-1], [10**9], ["a"], [None], [[]], [{}], LETTERS, list(range(VOCABULARY))),
    *({}, {"a": 1}, {"5": 1.0}, {"5": None}, {"regex": "a+"}, {"type": "json_object"}),
]
FIELDS = [
    *("temperature", "top_p", "top_k", "min_p", "seed", "n", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs", "logprob_token_ids", "echo"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"),
    *("allowed_token_ids", "structured_outputs", "response_format", "truncate_prompt_tokens"),
    *("include_stop_str_in_output", "skip_special_tokens", "priority", "repetition_detection"),
    *("use_beam_search", "length_penalty", "thinking_token_budget", "stream_interval", "prompt"),
    *("stream_options", "vllm_xargs", "kv_transfer_params", "cache_salt", "watermarking", "suffix"),
    *("add_special_tokens", "return_token_offsets", "truncation_side", "session_id"),
]


def mutations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Changes of BASE: one to four fields with junk."""
    draw = random.Random(seed)
    return [
        {field: draw.choice(JUNK) for field in draw.sample(FIELDS, draw.choice((1, 2, 2, 3, 4)))}
        for _ in range(count)
    ]
