"""The requests of the soak, each with what a right answer to it looks like."""

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from support import odd_requests
from support.engines import run_engine, run_odd_jobs
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
# Of the byte tokenizer: one token, and three, which are forced over several places of a draft.
REASONING = {"reasoning_start_str": "^", "reasoning_end_str": "~|~"}
BUDGETS = (0, 1, 5, 6, 11, 16)
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


@dataclass(frozen=True)
class Answer:
    """One choice of an answer."""

    ids: list[int]
    finish: str
    text: str


@dataclass
class SoakRequest:
    """A request and how to judge its answer."""

    kind: str  # "certain", "sampled", "structured" or "odd"
    prompt: list[int]
    params: dict[str, Any]
    expected: list[Answer] | None = None  # every choice, where plain vLLM's answer is not random
    refused: bool = False  # by plain vLLM
    judge: Callable[[Answer], bool] = lambda answer: True  # the form of a random answer's choice


def prompts(count: int, seed: int) -> list[list[int]]:
    """Of 1 to 150 tokens; some begin alike, over several cache blocks."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, VOCABULARY) for _ in range(80)]
    found = []
    for i in range(count):
        own = [draw.randrange(3, VOCABULARY) for _ in range(draw.choice((1, 7, 20, 40, 70)))]
        found.append((shared if i % 3 == 0 else []) + own)
    return found


def catalog() -> list[SoakRequest]:
    """Every request of the soak, without the answers to those of kind "certain" and "odd"."""
    base = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    certain = [
        SoakRequest("certain", prompt, {**base, **CERTAIN[i % len(CERTAIN)]})
        for i, prompt in enumerate(prompts(3 * len(CERTAIN), seed=1))
    ]
    start = TOKENIZER.encode(REASONING["reasoning_start_str"])
    certain += [
        SoakRequest("certain", [*prompt, *start], {**base, "thinking_token_budget": budget})
        for prompt, budget in zip(prompts(len(BUDGETS), seed=5), BUDGETS, strict=True)
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
        SoakRequest("odd", list(request.prompt), request.params)
        for request in odd_requests.table().values()
        if request.served
    ]
    return [*certain, *sampled, *structured, *odd]


def _length_is(length: int, allowed: list[int] | None) -> Callable[[Answer], bool]:
    vocabulary = set(range(VOCABULARY) if allowed is None else allowed)
    return lambda answer: len(answer.ids) == length and set(answer.ids) <= vocabulary


def _is_valid(valid: Callable[[str], bool]) -> Callable[[Answer], bool]:
    def judge(answer: Answer) -> bool:
        # Its text may begin with bytes of the prompt.
        own = TOKENIZER.decode([token for token in answer.ids if token != EOS])
        # A grammar may still be open where max_tokens ends it.
        try:
            return answer.finish == "length" or valid(own)
        except json.JSONDecodeError:
            return False

    return judge


def answered_catalog(target: str) -> list[SoakRequest]:
    """The catalog, with a plain engine's answers."""
    found = catalog()
    waiting = [request for request in found if request.kind in ("certain", "odd")]
    together = {"prompts": [r.prompt for r in waiting], "params": [r.params for r in waiting]}
    from vllm.config import ReasoningConfig

    engine = {"model": target, "max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": False}
    engine["reasoning_config"] = ReasoningConfig(**REASONING)
    # Plain vLLM ends on a CPU where a seeded prompt is prefilled in chunks.
    engine["max_num_batched_tokens"] = MAX_MODEL_LEN * len(waiting)
    outputs = run_engine(engine, {"": together}, work=run_odd_jobs)[""]
    odd = iter([request.exact for request in odd_requests.table().values() if request.served])
    for request, output in zip(waiting, outputs, strict=True):
        certain = request.kind == "certain" or next(odd)
        # HTTP also refuses a max_tokens that an engine would cut.
        request.refused = isinstance(output, dict) or request.params["max_tokens"] > MAX_MODEL_LEN
        if request.refused:
            continue
        if certain:
            request.expected = [Answer(**sequence) for sequence in output]
        else:
            longest = min(request.params["max_tokens"], MAX_MODEL_LEN - len(request.prompt))
            request.judge = lambda answer, longest=longest: 0 < len(answer.ids) <= longest
    return found
