"""Running servers other than vLLM's, which answer and score through endpoints of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vllm_hsd.errors import UserError
from vllm_hsd.tools.audit.servers import AT_ONCE, LOGPROBS, Server
from vllm_hsd.tools.planner.prompts import Prompt


def connect(option: str, url: str, model: str = "", at_once: int = AT_ONCE) -> Server:
    """The server at a URL, by what it says of itself in /v1/models: vLLM's unless it names another.

    Arguments and errors as for `Server`.
    """
    server = Server(option, url, model, at_once)
    kind = KINDS.get(server.owner, Server)
    return server if kind is Server else kind(option, url, server.model, at_once)


class SGLangServer(Server):
    """SGLang: /generate scores a prompt with `logprob_start_len` and `top_logprobs_num`."""

    kind = "SGLang"

    def version(self) -> str:
        return f"SGLang {self._read('/get_server_info', None, 'version')}"

    def token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            # It renders no chat without answering it.
            prompt = prompt[0]["content"]
        body = {"model": self.model, "prompt": prompt}
        return self._read("/tokenize", body, "tokens")

    def _steps(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Iterator[list[int]]:
        if params.get("top_p", 1) < 1:
            raise UserError(
                f"{self.option}: SGLang applies top-p and top-k to the same distribution, and vLLM "
                "one after the other: leave out --top-p below 1."
            )
        sampling = {
            "max_new_tokens": params["max_tokens"],
            "temperature": params["temperature"],
            "ignore_eos": params.get("ignore_eos", False),
            "top_k": params.get("top_k", -1),
        }
        if params.get("seed") is not None:
            sampling["sampling_seed"] = params["seed"]
        body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
        seen = 0
        for event in self._events("/generate", body):
            new, total = event["output_ids"], event["meta_info"]["completion_tokens"]
            # All tokens so far, or with --incremental-streaming-output those since the last event.
            new = new[seen:] if len(new) == total else new
            seen += len(new)
            yield new

    def _likeliest(self, tokens: Sequence[int], first: int) -> list[dict[int, float]]:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": first - 1,
            "top_logprobs_num": LOGPROBS,
        }
        found = self._read("/generate", body, "meta_info")
        count = len(tokens) - first
        try:
            # The first entry is of a token whose past was not asked for.
            likeliest = found["input_top_logprobs"][-count:]
            own = found["input_token_logprobs"][-count:]
            pairs = zip(likeliest, own, strict=True)
            return [{int(each[1]): each[0] for each in (*row, real)} for row, real in pairs]
        except (LookupError, TypeError, ValueError):
            raise self._odd("no log-probabilities of the prompt") from None


class LlamaCppServer(Server):
    """llama.cpp: /completion gives probabilities of new tokens only, so it is asked at each place.

    `cache_prompt` makes each such request cost about one token.
    """

    kind = "llama.cpp"
    doubt = (
        "llama.cpp takes ends of text out of its answers and not out of its probabilities, and "
        "sends accepted drafts token by token (as its source reads): it may fail, or show no "
        "drafts, although it is lossless."
    )

    def version(self) -> str:
        return f"llama.cpp {self._read('/props', None, 'build_info')}"

    def token_ids(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            prompt = self._read("/apply-template", {"messages": prompt}, "prompt")
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return self._read("/tokenize", body, "tokens")

    def _steps(self, prompt: Sequence[int], params: Mapping[str, Any]) -> Iterator[list[int]]:
        body = {
            "prompt": list(prompt),
            "n_predict": params["max_tokens"],
            "temperature": params["temperature"],
            "top_k": params.get("top_k", 0),
            "top_p": params.get("top_p", 1.0),
            "min_p": 0.0,
            # In the order of vLLM.
            "samplers": ["temperature", "top_k", "top_p"],
            "ignore_eos": params.get("ignore_eos", False),
            "seed": -1 if params.get("seed") is None else params["seed"],
            "return_tokens": True,
            "stream": True,
        }
        for event in self._events("/completion", body):
            # The last event repeats what was sent.
            if not event.get("stop"):
                yield event.get("tokens") or []

    def _likeliest(self, tokens: Sequence[int], first: int) -> list[dict[int, float]]:
        return [self._at(tokens[:place]) for place in range(first, len(tokens))]

    def _at(self, context: Sequence[int]) -> dict[int, float]:
        """Log-probabilities of the likeliest tokens after a context."""
        body = {
            "prompt": list(context),
            "n_predict": 1,
            "temperature": 0,
            "n_probs": LOGPROBS,
            "post_sampling_probs": False,
            "cache_prompt": True,
        }
        path = "completion_probabilities", 0, "top_logprobs"
        row = self._read("/completion", body, *path)
        # A token that is not among them has less than the last of them, and is outside top_k.
        return {int(each["id"]): each["logprob"] for each in row}


KINDS: dict[str, type[Server]] = {"sglang": SGLangServer, "llamacpp": LlamaCppServer}
