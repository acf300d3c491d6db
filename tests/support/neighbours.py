"""Batches in which a request that asks for something rare runs next to requests that do not.

What belongs to one request is applied to rows of a batch; a wrong row is the text of another.
Requests join, leave and move, and their drafts have different lengths.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from support.soak_requests import REASONING
from transformers import AutoTokenizer

MODELS = Path(__file__).parents[2] / "benchmarks/models"
TOKENIZER = AutoTokenizer.from_pretrained(MODELS / "target")
START = REASONING["reasoning_start_str"]
ENGINE: dict[str, Any] = {
    "model": str(MODELS / "target"),
    "skip_tokenizer_init": False,
    "max_num_seqs": 6,
    # Plain vLLM cannot serve a seeded prompt in chunks on a CPU.
    "max_num_batched_tokens": 1024,
}


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text)


LOOP = "import os\nimport sys\nimport re\n" * 2
READ = (
    "def read_lines(path):\n    with open(path) as file:\n"
    "        for line in file:\n            yield line\n\n"
)
# All repeat themselves, so that they have drafts, of different lengths, in most steps.
OTHERS = [
    READ + "def read_lines(",
    LOOP,
    READ + "def read",
    "the quick brown fox " * 3,
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1,",
]
GREEDY = {"temperature": 0, "max_tokens": 28, "ignore_eos": True}
SEEDED = {**GREEDY, "temperature": 1, "seed": 7}
NEWLINE = tokens("\n")[0]
RARE: dict[str, dict] = {
    # Where an end falls in a draft, and whether after it, depends on the text.
    **{f"budget {n}": {"thinking_token_budget": len(LOOP) + n} for n in range(1, 21)},
    # Leaves a row to another request with its thinking under way.
    "budget that is not spent": {"thinking_token_budget": len(LOOP) + 14, "max_tokens": 6},
    "budget spent in the prompt": {"thinking_token_budget": 3},
    "allowed": {"allowed_token_ids": tokens("import os\nsyre")},
    "bias": {"logit_bias": {tokens("q")[0]: 50.0}},
    "penalties": {"repetition_penalty": 1.8, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "bad words": {"bad_words_ids": [tokens("mp"), [NEWLINE]]},
    "min tokens": {"min_tokens": 20, "stop_token_ids": [NEWLINE], "ignore_eos": False},
    "grammar": {"structured_outputs": {"regex": "(ab){14}"}, "ignore_eos": False},
    "listed": {"logprob_token_ids": tokens("xyz")},
    "log-probabilities": {"logprobs": 4},
    "min-p": {"min_p": 0.3, "temperature": 1, "seed": 3},
    "top-k": {"top_k": 1, "temperature": 1},
}


def job(rare: dict, place: int, params: dict = GREEDY) -> dict:
    """Nine requests, of which six run at once; the one at `place` and the third after it are rare.

    Every second one of the others has log-probabilities.
    """
    prompts = [tokens(OTHERS[i % len(OTHERS)] + "i" * (i // 5)) for i in range(9)]
    listed = [{**params, "max_tokens": 16 + 4 * (i % 4)} for i in range(9)]
    for i in range(1, 9, 2):
        listed[i] = {**listed[i], "logprobs": 2}
    for i in (place, place + 3):
        prompts[i] = tokens(START + LOOP)
        listed[i] = {**GREEDY, "max_tokens": 28, **rare}
    arrive = [0, 0, 0, 1, 3, 4, 6, 7, 9]
    return {"prompts": prompts, "params": listed, "arrive": arrive, "abort": {(place + 1) % 3: 8}}


# All kinds; few budgets.
SOME = [name for name in RARE if not name.startswith("budget ") or name[-1] in "38td"]


def jobs(names: Collection[str] = RARE, places: Sequence[int] = (0, 4)) -> dict[str, dict]:
    """Name -> job; the rare one comes first or in the middle, the others are greedy or seeded."""
    return {
        f"{name}, from {place}": job(RARE[name], place, (GREEDY, SEEDED)[i // 2 % 2])
        for i, name in enumerate(RARE)
        for place in (places if "budget" not in name else (i % 2 * 4,))
        if name in names
    }


def without_lists(jobs: dict[str, dict]) -> dict[str, dict]:
    """The jobs as plain vLLM is right about them.

    It answers `logprob_token_ids` to all, and leaves a budget that is not spent to the next request
    in the row, where it changes nothing of its own request's text.
    """

    def given(params: dict) -> dict:
        unspent = {"thinking_token_budget"} if params["max_tokens"] < 10 else set()
        return {k: v for k, v in params.items() if k not in {"logprob_token_ids"} | unspent}

    return {n: {**each, "params": list(map(given, each["params"]))} for n, each in jobs.items()}


def without_listed(results: dict, jobs: dict[str, dict]) -> dict:
    """Results without the log-probabilities of requests that list their tokens."""
    found = {}
    for name, result in results.items():
        outputs = [
            output and [{**sequence, "logprobs": None} for sequence in output]
            if "logprob_token_ids" in params
            else output
            for output, params in zip(result["outputs"], jobs[name]["params"], strict=True)
        ]
        found[name] = {**result, "outputs": outputs}
    return found
