"""A running OpenAI server of vLLM, which answers and scores as an `EngineProcess` does.

A server gives out the most likely tokens of a prompt's places, LOGPROBS of them unless it was
started with more. So text is sampled with a smaller top_k: the filtered distribution is then known,
also where several tokens tie for the last place, which happens in 16 bits.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from vllm_hsd.errors import UserError, brief
from vllm_hsd.tools.audit.directions import marks
from vllm_hsd.tools.engine import Generation, Ids, Params
from vllm_hsd.tools.planner.prompts import Prompt

# vLLM's default of --max-logprobs.
LOGPROBS = 20
TOP_K = 16
# vLLM takes what a request does not say from the model's generation_config.json.
UNFILTERED = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
UNFILTERED |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
TIMEOUT = 600
# Requests in progress at a server.
AT_ONCE = 32


class Server:
    """One server and one model of it.

    Args:
        option: the option that names it, for messages.
        url: as in http://host:8000, with or without /v1.
        model: empty for the first one that it serves.
        at_once: requests in progress.

    Raises:
        UserError: no URL. So does every method if the server cannot be reached, refuses, or
            answers with something else.
    """

    kind = "vLLM"
    # A sentence for the page: why its answers may not show what they should.
    doubt = ""

    def __init__(self, option: str, url: str, model: str = "", at_once: int = AT_ONCE) -> None:
        self.option, self.at_once = option, at_once
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{option} '{url}' is not a URL such as http://localhost:8000.")
        served = self._read("/v1/models", None, "data", 0)
        if not isinstance(served, dict):
            raise self._odd("models without names")
        self.model: str = model or served.get("id", "")
        self.owner = served.get("owned_by", "")

    def version(self) -> str:
        return self._read("/version", None, "version")

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a text, or of a chat; as plain text where the model has no template."""
        key = "prompt" if isinstance(prompt, str) else "messages"
        try:
            return self._read("/tokenize", {"model": self.model, key: prompt}, "tokens")
        except UserError as error:
            if isinstance(prompt, str) or "chat template" not in str(error):
                raise
            return self.token_ids(prompt[0]["content"])

    def generate(self, prompts: Ids, sampling_params: Mapping[str, Any] | Params) -> Generation:
        """As `EngineProcess.generate`, without times and counts.

        Tokens of steps that the server sends at once count as one step.
        """
        shared = isinstance(sampling_params, Mapping)
        params = [sampling_params] * len(prompts) if shared else sampling_params
        found = list(self._map(self._complete, zip(prompts, params, strict=True)))
        zeros = [0.0] * len(found)
        return Generation(
            [token_ids for token_ids, _ in found],
            [""] * len(found),
            0.0,
            0.0,
            zeros,
            zeros,
            [len(lengths) for _, lengths in found],
            step_lengths=[lengths for _, lengths in found],
        )

    def _complete(self, request: tuple[Sequence[int], Any]) -> tuple[list[int], list[int]]:
        """(token ids, tokens of every step) of one answer."""
        steps = [new for new in self._steps(*request) if new]
        if not steps:
            raise self._odd("no token ids")
        return [token for step in steps for token in step], list(map(len, steps))

    def _steps(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Iterator[list[int]]:
        """The token ids of one answer as they come; some may be empty."""
        given = {key: value for key, value in params.items() if value is not None}
        body = UNFILTERED | given
        body |= {"prompt": list(prompt), "stream": True, "return_token_ids": True}
        for chunk in self._events("/v1/completions", {**body, "model": self.model}):
            yield from (choice.get("token_ids") or [] for choice in chunk.get("choices", ()))

    def score(
        self, prompts: Ids, texts: Ids, params: Params, rows: Mapping[str, Sequence[np.ndarray]]
    ) -> tuple[list[np.ndarray], list[str]]:
        """As `scorer.score`, by the log-probabilities of this server without speculation.

        Why a text ends is not told.
        """

        def ranges(i: int) -> np.ndarray:
            likeliest = self._likeliest([*prompts[i], *texts[i]], len(prompts[i]))
            kept = [kept_probabilities(each, params[i]) for each in likeliest]
            found = [np.array([token_range(*each) for each in zip(kept, texts[i], strict=True)])]
            for own in rows.values():
                places = zip(kept, texts[i], own[i], strict=True)
                found.append(np.array([_marks(*place) for place in places]))
            return np.concatenate(found, 1)

        return list(self._map(ranges, range(len(prompts)))), []

    def gaps(self, places: Sequence[tuple[Sequence[int], int, int]]) -> list[float]:
        """By how much the less likely of two tokens after a context falls short of the likeliest.

        In nats; infinite where the server does not give out the second one.
        """

        def gap(place: tuple[Sequence[int], int, int]) -> float:
            context, *pair = place
            row = self._likeliest([*context, pair[0]], len(context))[-1]
            return max(row.values()) - min(row.get(token, -math.inf) for token in pair)

        return list(self._map(gap, places))

    def _likeliest(self, tokens: Sequence[int], first: int) -> list[dict[int, float]]:
        """From place `first` on: log-probabilities of the likeliest and the real token."""
        body = {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": LOGPROBS,
        }
        rows = self._read("/v1/completions", body, "choices", 0, "prompt_logprobs")
        return [
            {int(token): entry["logprob"] for token, entry in row.items()} for row in rows[first:]
        ]

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The objects of a streamed answer, to its end."""
        with self._open(path, body) as response:
            for found in self._objects(response):
                if "error" in found:
                    raise UserError(f"{self.option}: {brief(found['error'])}.")
                yield found

    def _objects(self, response: Iterable[bytes]) -> Iterator[dict[str, Any]]:
        """Of a stream that ends with [DONE], or, llama.cpp's, with an object that says stop."""
        found, reason = {}, "no end"
        try:
            for line in response:
                data = line.decode().removeprefix("data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == "[DONE]":
                    return
                found = dict(json.loads(data))
                yield found
        except (OSError, ValueError, TypeError, http.client.HTTPException) as error:
            found, reason = {}, brief(error)
        if not found.get("stop"):
            raise UserError(
                f"{self.option} '{self.url}' broke off an answer ({reason}): run this again when "
                "it is up."
            )

    def _read(self, url_path: str, body: dict[str, Any] | None, *path: str | int) -> Any:
        """A value of a JSON answer."""
        with self._open(url_path, body) as response:
            try:
                found = json.load(response)
                for key in path:
                    found = found[key]
            except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
                raise self._odd("no " + ".".join(map(str, path))) from None
        return found

    def _odd(self, fault: str) -> UserError:
        return UserError(
            f"{self.option} '{self.url}' answers with {fault}: is it a server of {self.kind}?"
        )

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            if key := os.environ.get("VLLM_API_KEY", "").strip():
                # Not where the server sends the request on to.
                request.add_unredirected_header("Authorization", f"Bearer {key}")
            return urllib.request.urlopen(request, timeout=TIMEOUT)
        except urllib.error.HTTPError as error:
            try:
                reason = brief(error.read().decode(errors="replace"))
            except (OSError, http.client.HTTPException):
                reason = brief(error)
            hint = "" if "logprobs" not in reason else f"; start it with --max-logprobs {LOGPROBS}"
            raise UserError(f"{self.option} refuses {path}: {reason}{hint}.") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = brief(error)
            raise UserError(f"{self.option} '{self.url}' cannot be reached ({reason}).") from None

    def _map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        with ThreadPoolExecutor(self.at_once) as pool:
            yield from pool.map(function, items)


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


def token_range(probs: Mapping[int, float], token: int) -> tuple[float, float, float, float]:
    """`quantiles.token_ranges` of one token, by `kept_probabilities`."""
    order = list(probs)
    before = sum(p for each, p in probs.items() if each < token)
    likelier = order[: order.index(token)] if token in probs else order
    own = probs.get(token, 0.0)
    above = sum(probs[each] for each in likelier)
    return own, before, above, sum(p for p in probs.values() if p <= own)


def _marks(probs: Mapping[int, float], token: int, row: np.ndarray) -> np.ndarray:
    """`directions.marks` of one token, [WIDTH], by `kept_probabilities` and a row of a drafter."""
    known = sorted({*probs, token})
    number = {each: i for i, each in enumerate(known)}
    ids = [number.get(int(each), -1) for each in row[0]]
    small = np.stack((np.array(ids, dtype=np.float32), row[1]))
    dense = torch.tensor([[probs.get(each, 0.0) for each in known]])
    return marks(dense, torch.tensor([number[token]]), small[None])[0]
