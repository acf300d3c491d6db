"""Text of a running OpenAI server of vLLM, scored by a second one without speculation.

A server gives out the most likely tokens of a prompt's places, LOGPROBS of them unless it was
started with more. So text is sampled with a smaller top_k: the filtered distribution is then known,
also where several tokens tie for the last place, which happens in 16 bits.
"""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from vllm_hsd.errors import UserError, brief
from vllm_hsd.lossless.directions import marks
from vllm_hsd.lossless.sampled import Texts
from vllm_hsd.planner.prompts import Prompt

# vLLM's default of --max-logprobs.
LOGPROBS = 20
TOP_K = 16
TIMEOUT = 600
# Requests in progress at a server.
AT_ONCE = 32


class Server:
    """One server.

    Args:
        option: the option that names it, for messages.
        url: as in http://host:8000, with or without /v1.
    """

    def __init__(self, option: str, url: str) -> None:
        self.option = option
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{option} '{url}' is not a URL such as http://localhost:8000.")

    def version(self) -> str:
        """Version of its vLLM."""
        with self._open("/version", None) as response:
            return self._read(response, "version")

    def model(self) -> str:
        """Name of the first model that it serves."""
        with self._open("/v1/models", None) as response:
            return self._read(response, "data", 0, "id")

    def token_ids(self, model: str, prompt: Prompt) -> list[int]:
        """Token ids of a text, or of a chat in the model's template."""
        key = "prompt" if isinstance(prompt, str) else "messages"
        with self._open("/tokenize", {"model": model, key: prompt}) as response:
            return self._read(response, "tokens")

    def complete(self, body: dict[str, Any]) -> tuple[list[int], list[int]]:
        """(token ids, tokens of every step) of one answer.

        Tokens of steps that the server sends at once count as one step.

        Raises:
            UserError: the server refuses, or sends no token ids.
        """
        body = {**body, "stream": True, "return_token_ids": True}
        lengths, token_ids = [], []
        with self._open("/v1/completions", body) as response:
            for chunk in _events(response):
                if "error" in chunk:
                    raise UserError(f"{self.option}: {brief(chunk['error'])}.")
                for choice in chunk["choices"]:
                    if new := choice.get("token_ids"):
                        token_ids += new
                        lengths.append(len(new))
        if not token_ids:
            raise self._odd("no token ids")
        return token_ids, lengths

    def likeliest(self, model: str, tokens: Sequence[int]) -> list[dict[int, float]]:
        """At every place but the first: log-probabilities of the likeliest and of the real token.

        Raises:
            UserError: the server gives out too few.
        """
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": LOGPROBS,
        }
        with self._open("/v1/completions", body) as response:
            rows = self._read(response, "choices", 0, "prompt_logprobs")
        return [{int(token): entry["logprob"] for token, entry in row.items()} for row in rows[1:]]

    def _read(self, response: Any, *path: str | int) -> Any:
        """A value of a JSON answer."""
        try:
            found = json.load(response)
            for key in path:
                found = found[key]
        except (ValueError, LookupError, TypeError):
            raise self._odd("no " + ".".join(map(str, path))) from None
        return found

    def _odd(self, fault: str) -> UserError:
        return UserError(
            f"{self.option} '{self.url}' answers with {fault}: is it an OpenAI server of vLLM?"
        )

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            return urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=TIMEOUT
            )
        except urllib.error.HTTPError as error:
            reason = brief(error.read().decode(errors="replace"))
            hint = "" if "logprobs" not in reason else f"; start it with --max-logprobs {LOGPROBS}"
            raise UserError(f"{self.option} refuses {path}: {reason}{hint}.") from None
        except OSError as error:
            raise UserError(f"{self.option} '{self.url}' cannot be reached ({error}).") from None


def generate(server: Server, model: str, texts: Texts, progress: Callable[[str], object]) -> None:
    """Fill in the answers of `texts`."""
    bodies = [
        {
            "model": model,
            "prompt": list(prompt),
            **{key: value for key, value in params.items() if value is not None},
        }
        for prompt, params in zip(texts.prompts, texts.params, strict=True)
    ]
    for done, (token_ids, lengths) in enumerate(_map(server.complete, bodies), 1):
        texts.token_ids.append(token_ids)
        texts.step_lengths.append(lengths)
        if done % AT_ONCE == 0 or done == len(bodies):
            progress(f"sampled {done} of {len(bodies)} answers")


def score(
    server: Server, model: str, texts: Texts, progress: Callable[[str], object]
) -> list[np.ndarray]:
    """As `sampled.scored`, by the log-probabilities of a server without speculation."""

    def ranges(number: int) -> np.ndarray:
        prompt, answer = texts.prompts[number], texts.token_ids[number]
        rows = server.likeliest(model, [*prompt, *answer])[len(prompt) - 1 :]
        kept = [kept_probabilities(row, texts.params[number]) for row in rows]
        found = [np.array([token_range(*each) for each in zip(kept, answer, strict=True)])]
        for own in texts.rows.values():
            places = zip(kept, answer, own[number], strict=True)
            found.append(np.array([_marks(*place) for place in places]))
        return np.concatenate(found, 1)

    found = []
    for own in _map(ranges, range(len(texts.prompts))):
        found.append(own)
        if len(found) % AT_ONCE == 0 or len(found) == len(texts.prompts):
            progress(f"scored {len(found)} of {len(texts.prompts)} answers without speculation")
    return found


def kept_probabilities(
    logprobs: Mapping[int, float], params: Mapping[str, Any]
) -> dict[int, float]:
    """Tokens that the filters keep -> probability, the likeliest first, ties in the order of ids.

    Args:
        logprobs: of the likeliest tokens, more than params["top_k"] of them.
        params: temperature, top_k and optionally top_p.
    """
    kept = sorted(logprobs, key=lambda each: (-logprobs[each], each))
    best, last = logprobs[kept[0]], logprobs[kept[params["top_k"] - 1]]
    kept = [each for each in kept if logprobs[each] >= last]
    weights = [math.exp((logprobs[each] - best) / params["temperature"]) for each in kept]
    total, above, count = sum(weights), 0.0, 0
    # A token is kept where the mass of all likelier ones is below top_p.
    while count < len(kept) and (count == 0 or above < params.get("top_p", 1) * total):
        above += weights[count]
        count += 1
    return {each: weight / above for each, weight in zip(kept[:count], weights, strict=False)}


def token_range(probs: Mapping[int, float], token: int) -> tuple[float, float, float]:
    """`quantiles.token_ranges` of one token, by `kept_probabilities`."""
    order = list(probs)
    own = probs.get(token, 0.0)
    before = sum(p for each, p in probs.items() if each < token)
    likelier = order[: order.index(token)] if token in probs else order
    return own, before, sum(probs[each] for each in likelier)


def _marks(probs: Mapping[int, float], token: int, row: np.ndarray) -> np.ndarray:
    """`directions.marks` of one token, [WIDTH], by `kept_probabilities` and a row of a drafter."""
    known = sorted({*probs, token})
    number = {each: i for i, each in enumerate(known)}
    ids = [number.get(int(each), -1) for each in row[0]]
    small = np.stack((np.array(ids, dtype=np.float32), row[1]))
    dense = torch.tensor([[probs.get(each, 0.0) for each in known]])
    return marks(dense, torch.tensor([number[token]]), small[None])[0]


def gap(server: Server, model: str, context: Sequence[int], expected: int, found: int) -> float:
    """By how much the less likely of two tokens falls short of the likeliest, in nats."""
    row = server.likeliest(model, [*context, expected])[-1]
    if found not in row:
        return math.inf
    return max(row.values()) - min(row[expected], row[found])


def _map(function: Callable[[Any], Any], items: Any) -> Iterator[Any]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(function, items)


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.decode().removeprefix("data:").strip()
        if line.startswith(b"data:") and data != "[DONE]":
            yield json.loads(data)
