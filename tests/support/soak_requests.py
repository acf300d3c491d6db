"""The requests of the soak, each with what a right answer to it looks like."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from support import odd_requests
from support.odd_requests import EOS, LETTERS, MAX_MODEL_LEN, TOKENIZER, VOCABULARY

CHOICES = ["ab", "ace", "add", "be", "bee", "cab"]
PATTERN = "(ab|cd){2,6}e[0-9]{3}"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
# Parameters under which plain vLLM's answer is not random.
CERTAIN: list[dict[str, Any]] = [
    {},
    {"max_tokens": 8},
    {"max_tokens": 90},
    {"logprobs": 3},
    {"prompt_logprobs": 1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"logit_bias": {70: 4.0, 71: -100.0}},
    {"min_p": 0.3},
    {"temperature": 1, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 1},
    {"allowed_token_ids": LETTERS},
    {"allowed_token_ids": LETTERS, "stop": ["ab", "c", "fe", "dd"]},
    {"allowed_token_ids": LETTERS, "bad_words": ["a", "bc", "dd"]},
    {"stop_token_ids": list(range(3, VOCABULARY, 16)), "min_tokens": 3},
    {"logit_bias": {EOS: 9.0}, "min_tokens": 7, "ignore_eos": False},
    {"structured_outputs": {"choice": CHOICES}, "ignore_eos": False},
    {"structured_outputs": {"regex": PATTERN}, "ignore_eos": False},
]
SAMPLED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 12},
    {"temperature": 1.2, "min_p": 0.05},
    {"logprobs": 5, "seed": 3},
    {"seed": 4, "repetition_penalty": 1.2},
    {"seed": 5, "presence_penalty": -0.5},
    {"seed": 6, "logit_bias": {70: 4.0}},
    {"n": 3},
    {"n": 2, "seed": 7, "top_p": 0.8},
    {"max_tokens": 90, "seed": 8},
    {"allowed_token_ids": LETTERS, "bad_words": ["a", "bc"], "seed": 9},
]
STRUCTURED: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"choice": CHOICES}, lambda text: text in CHOICES),
    ({"regex": PATTERN}, lambda text: re.fullmatch(PATTERN, text) is not None),
    ({"json": SCHEMA}, lambda text: set(json.loads(text)) == {"a", "b"}),
]


@dataclass
class SoakRequest:
    """A request and how to judge its answer.

    Attributes:
        kind: "certain", "sampled", "structured" or "odd".
        expected: token ids and finish reasons of every choice, where they are known.
        refused: plain vLLM does not take the request; None where HTTP may be stricter.
        judge: of one choice's text, token ids and finish reason.
    """

    kind: str
    prompt: list[int]
    params: dict[str, Any]
    expected: list[tuple[list[int], str]] | None = None
    refused: bool | None = False
    judge: Callable[[str, list[int], str], bool] = field(default=lambda text, ids, finish: True)

    @property
    def case(self) -> dict:
        """The request for `support.case_engine`."""
        return {"prompts": [self.prompt], "params": [self.params]}

    @property
    def body(self) -> dict[str, Any]:
        """The request for /v1/completions."""
        return {"model": "tiny", "prompt": self.prompt, "return_token_ids": True, **self.params}


def prompts(count: int, seed: int) -> list[list[int]]:
    """Of 1 to 150 tokens; some begin alike, over several cache blocks."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, VOCABULARY) for _ in range(80)]
    found = []
    for i in range(count):
        own = [draw.randrange(3, VOCABULARY) for _ in range(draw.choice((1, 7, 20, 40, 70)))]
        found.append((shared if i % 3 == 0 else []) + own)
    return found


def catalog(seeded: bool = True) -> list[SoakRequest]:
    """Every request of the soak; those of kind "certain" and "odd" wait for `expect`.

    Args:
        seeded: without, no request has a seed (plain vLLM on CPU dies where a seeded prompt is
            prefilled in chunks).
    """
    base = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    certain = [
        SoakRequest("certain", prompt, {**base, **CERTAIN[i % len(CERTAIN)]})
        for i, prompt in enumerate(prompts(3 * len(CERTAIN), seed=1))
    ]
    sampled = []
    for i, prompt in enumerate(prompts(2 * len(SAMPLED), seed=2)):
        params = {**base, "temperature": 1, **SAMPLED[i % len(SAMPLED)]}
        judge = _length_is(params["max_tokens"], params.get("allowed_token_ids"))
        sampled.append(SoakRequest("sampled", prompt, params, judge=judge))
    structured = []
    for i, prompt in enumerate(prompts(2 * len(STRUCTURED), seed=3)):
        constraint, valid = STRUCTURED[i % len(STRUCTURED)]
        params = {**base, "temperature": 1, "ignore_eos": False, "max_tokens": 90}
        params |= {"structured_outputs": constraint, "seed": i}
        judge = _is_valid(valid)
        structured.append(SoakRequest("structured", prompt, params, judge=judge))
    odd = [
        SoakRequest("odd", list(request.prompt), request.params, refused=None)
        for request in odd_requests.table().values()
        if request.served
    ]
    found = [*certain, *sampled, *structured, *odd]
    if not seeded:
        for request in found:
            request.params = {k: v for k, v in request.params.items() if k != "seed"}
    return found


def _length_is(length: int, allowed: list[int] | None) -> Callable[[str, list[int], str], bool]:
    vocabulary = set(range(VOCABULARY) if allowed is None else allowed)
    return lambda text, ids, finish: len(ids) == length and set(ids) <= vocabulary


def _is_valid(valid: Callable[[str], bool]) -> Callable[[str, list[int], str], bool]:
    # A grammar may still be open where max_tokens ends it.
    return lambda text, ids, finish: finish == "length" or valid(text)


def expect(requests: list[SoakRequest], answers: list[dict]) -> None:
    """Note what a plain engine answered to the requests of kind "certain" and "odd".

    Args:
        answers: results of `support.case_engine.run_cases` for them, in order.
    """
    exact = {
        name: request.exact for name, request in odd_requests.table().items() if request.served
    }
    odd = iter(exact.values())
    for request, answer in zip(requests, answers, strict=True):
        assert answer["raised"] is None, answer
        [output] = answer["outputs"]
        certain = request.kind == "certain" or next(odd)
        if isinstance(output, dict):
            request.refused = True
        elif certain:
            request.refused = False
            request.expected = [(sequence["ids"], sequence["finish"]) for sequence in output]
        else:
            longest = min(request.params["max_tokens"], MAX_MODEL_LEN - len(request.prompt))
            request.judge = lambda text, ids, finish, longest=longest: 0 < len(ids) <= longest


def waiting_for_plain(requests: list[SoakRequest]) -> list[SoakRequest]:
    return [request for request in requests if request.kind in ("certain", "odd")]
