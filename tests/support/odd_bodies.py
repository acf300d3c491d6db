"""Bodies for /v1/completions that a client may send, sensible or not.

Most of them leave an answer that is not random: a server with a cascade must answer what a plain
one does, status and choices alike.
"""

import json
import random
from typing import Any

from support.odd_requests import EOS, LETTERS, PROMPT, VOCABULARY

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
# Changes of BASE whose answer is not random.
CERTAIN: dict[str, dict[str, Any]] = {
    "as it is": {},
    "another model": {"model": "other"},
    "no prompt": {"prompt": None},
    "empty prompt": {"prompt": ""},
    "several prompts": {"prompt": ["a", "def f(", "zz", "a"]},
    "several prompts, one empty": {"prompt": ["a", ""]},
    "prompts of tokens": {"prompt": [PROMPT, LETTERS, PROMPT]},
    "an empty prompt of tokens": {"prompt": [[]]},
    "mixed prompts": {"prompt": ["a", LETTERS]},
    "negative token": {"prompt": [-1, 5]},
    "token beyond the vocabulary": {"prompt": [VOCABULARY, 5]},
    "fractional token": {"prompt": [1.5]},
    "sixty-four prompts": {"prompt": [[i + 3, i + 4] for i in range(64)], "max_tokens": 4},
    "long prompt": {"prompt": "a" * 255},
    "too long prompt": {"prompt": "a" * 100_000},
    "cut prompt": {"prompt": "abcdefgh" * 60, "truncate_prompt_tokens": 9},
    "prompt cut to the model": {"prompt": "abcdefgh" * 60, "truncate_prompt_tokens": -1},
    "prompt cut to nothing": {"truncate_prompt_tokens": 0},
    "control characters": {"prompt": "\0\x01\x02\x7f"},
    "emoji and accents": {"prompt": "e\u0301 \U0001f9ed \u202e"},
    "lone surrogate": {"prompt": "\ud800"},
    "echo": {"echo": True},
    "echo of everything": {"echo": True, "logprobs": 2, "max_tokens": 1},
    "echo and no tokens": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "suffix": {"suffix": "x"},
    "no temperature": {"temperature": None, "top_k": 1},
    "n 0": {"n": 0},
    "n 3 at temperature 0": {"n": 3},
    "n 4": {"n": 4, "temperature": 1, "top_k": 1},
    "beam search": {"use_beam_search": True, "n": 3},
    "beam search with penalties": {"use_beam_search": True, "n": 2, "length_penalty": -3.0},
    "stop at a letter": {"allowed_token_ids": LETTERS, "stop": ["a", "b", "c", "d"]},
    "stop included": {
        "allowed_token_ids": LETTERS,
        "stop": ["e", "ab"],
        "include_stop_str_in_output": True,
    },
    "too many stops": {"stop": ["a"] * 5},
    "stop and min_tokens": {"allowed_token_ids": LETTERS, "stop": ["a", "b"], "min_tokens": 5},
    "no special tokens": {"skip_special_tokens": False, "logit_bias": {str(EOS): 100}},
    "bias of no token": {"logit_bias": {"x": 1}},
    "bias beyond": {"logit_bias": {"5": 101, "6": -1000}},
    "bias of all": {"logit_bias": {str(i): i % 7 - 3 for i in range(VOCABULARY)}},
    "one token allowed many times": {"allowed_token_ids": [LETTERS[0]] * 5000},
    "allowed and biased away": {
        "allowed_token_ids": LETTERS[:2],
        "logit_bias": {str(LETTERS[0]): -100},
    },
    "bad words of one space": {"bad_words": [" "]},
    "empty bad word": {"bad_words": [""]},
    "bad words, many": {"bad_words": [a + b for a in "abcdefghijkl" for b in "abcdefghijklmn"]},
    "logprobs 0": {"logprobs": 0},
    "logprobs 5": {"logprobs": 5, "max_tokens": 20},
    "logprobs -1": {"logprobs": -1},
    "logprobs 21": {"logprobs": 21},
    "prompt_logprobs -1": {"prompt_logprobs": -1},
    "logprobs of tokens": {"logprob_token_ids": [5, 9, 11], "max_tokens": 20},
    "logprobs of tokens, numbered": {"logprobs": 2, "logprob_token_ids": [9, 5], "max_tokens": 20},
    "logprobs of unknown tokens": {"logprob_token_ids": [VOCABULARY]},
    "logprobs of no tokens": {"logprob_token_ids": []},
    "tokens as numbers": {"logprobs": 2, "return_tokens_as_token_ids": True},
    "repetition": {
        "max_tokens": 200,
        "repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2},
    },
    "thinking budget": {"thinking_token_budget": 3},
    "watermark": {"watermarking": True},
    "priority": {"priority": 7},
    "salt": {"cache_salt": "x"},
    "empty salt": {"cache_salt": ""},
    "extra arguments": {"vllm_xargs": {"a": 1, "b": "c", "d": [1, 2]}},
    "transfer of KV": {"kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": [1]}},
    "transfer from elsewhere": {
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "remote_engine_id": "x",
            "remote_block_ids": [9**9],
        }
    },
    "embeddings": {"prompt_embeds": "AAAA"},
    "routed experts": {"routed_experts_prompt_start": 3},
    "a field that does not exist": {"levels": [{"model": "m"}]},
    "speculation": {"speculative_config": {"method": "none"}, "num_speculative_tokens": 0},
    "json": {"response_format": {"type": "json_object"}, "max_tokens": 60},
    "two grammars": {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    "empty choice": {"structured_outputs": {"choice": []}},
    "choices": {"structured_outputs": {"choice": [f"{i}x" * 9 for i in range(300)]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "a" root "b" | "c"'}, "max_tokens": 30},
    "left-recursive grammar": {"structured_outputs": {"grammar": "root ::= root"}},
    "grammar of nothing": {"structured_outputs": {"regex": ""}},
    "endless grammar": {"structured_outputs": {"regex": "(a|b)*"}, "max_tokens": 200},
    "a number": {"structured_outputs": {"regex": "[0-9]{1,20}"}, "max_tokens": 40},
    "grammar and stop": {
        "structured_outputs": {"regex": "(ab|cd){3,9}"},
        "stop": ["cd"],
        "max_tokens": 40,
    },
    "grammar and bad words": {
        "structured_outputs": {"regex": "(ab|cd){3,9}"},
        "bad_words": ["ab"],
        "max_tokens": 40,
    },
    "grammar and min_tokens": {
        "structured_outputs": {"regex": "ab?"},
        "min_tokens": 6,
        "max_tokens": 40,
    },
    "grammar and penalties": {
        "structured_outputs": {"regex": "[a-f]{12}"},
        "repetition_penalty": 1e-3,
        "presence_penalty": 2,
        "max_tokens": 40,
    },
    "schema that refers to itself": {
        "structured_outputs": {"json": {"$ref": "#"}},
        "max_tokens": 40,
    },
    "schema of another planet": {"structured_outputs": {"json": {"type": "planet"}}},
    "structural tag": {"structured_outputs": {"structural_tag": "{}"}},
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
