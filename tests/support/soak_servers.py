"""Servers for the soak: crowded ones with a cascade, and a fake one whose faults are counted."""

import asyncio
import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from aiohttp import web
from support.level_files import LevelFiles
from support.odd_requests import EOS, LETTERS, TOKENIZER, VOCABULARY
from support.soak_requests import Answer, SoakRequest, catalog, prompts

from vllm_hsd.core.text_store import collect_texts, write_store

# Chunked prefill, preemption and prefix caching within seconds.
CROWDED = {
    "max-num-seqs": 64,
    "block-size": 32,
    "num-gpu-blocks-override": 24,
    "max-num-batched-tokens": 160,
}
# Texts that the structured requests of the catalog allow, in its order, and one that they do not.
VALID, INVALID = ("ab", "abcde123", '{"a": 7, "b": "x"}'), "{"


def write_table(path: Path, *more: list[int]) -> str:
    """A store of texts for `three_levels`, `more` among them."""
    texts = [np.array(text) for text in (*prompts(200, seed=4), *more)]
    write_store(collect_texts(texts, vocab_size=VOCABULARY), str(path))
    return str(path)


def two_models(family) -> dict:
    levels = [{"model": family.small, "num_tokens": 3}, {"model": family.mid}]
    return {"method": "hsd", "adaptive": False, "num_speculative_tokens": 6, "levels": levels}


def three_levels(family, bigram: str) -> dict:
    config = two_models(family)
    lowest = {"bigram": bigram, "num_tokens": 2}
    return {**config, "levels": [lowest, *config["levels"]], "horizontal_tokens": 2}


def lookups_and_heads(family, files: LevelFiles) -> dict[str, dict]:
    """Name -> a cascade with kinds of levels that `three_levels` has not."""
    ngram, head = {"ngram": {"max": 3}}, {"eagle3": files.eagle3}
    # The oldest outputs soon make room for new ones.
    suffix = {"suffix": {"store": files.store, "shared_tokens": 4000}}
    small, mid = {"model": family.small}, {"model": family.mid}
    levels = {
        "suffix": [suffix],
        "suffix below a model": [{**suffix, "num_tokens": 4}, mid],
        "sources": [{"sources": [ngram, suffix, small], "num_tokens": 3}, mid],
        "eagle3": [head],
        "eagle3 below a model": [{**head, "num_tokens": 2}, {**mid, "max_rounds": 1}],
        "eagle3 in sources": [{"sources": [ngram, suffix, head]}],
        "adaptive": [
            {"sources": [ngram, suffix], "num_tokens": 2},
            {**small, "num_tokens": 3},
            mid,
        ],
    }
    base = {"method": "hsd", "adaptive": False, "num_speculative_tokens": 6}
    found = {name: {**base, "levels": given} for name, given in levels.items()}
    found["adaptive"]["adaptive"] = True
    return found


class FakeServer:
    """Answers a catalog of requests at once and without a model; use it as a context manager.

    Args:
        every: kind of fault -> one in so many requests of its sort has it: "wrong" (another
            answer), "hung" (none), "error" (HTTP 500) and "lost" (half an answer) for whole
            answers, "cut" (no end) for streams.

    Attributes:
        requests: the catalog; what is certain expects the answers that this server gives.
        faults: kind of fault -> number of answers that had it.
    """

    def __init__(self, every: dict[str, int]) -> None:
        self.every, self.faults, self._seen = every, Counter(), Counter()
        self.requests, self._known = catalog(), {}
        texts = itertools.cycle(VALID)
        for i, request in enumerate(self.requests):
            if request.kind == "odd":
                request.refused = True
                continue
            if request.kind == "structured":
                answer = Answer([*TOKENIZER.encode(next(texts)), EOS], "stop", "")
            else:
                allowed = request.params.get("allowed_token_ids", LETTERS)
                ids = [allowed[(i + t) % len(allowed)] for t in range(request.params["max_tokens"])]
                answer = Answer(ids, "length", TOKENIZER.decode(ids))
            answers = [answer] * request.params.get("n", 1)
            self._known[_key(request.body)] = request, answers
            if request.kind == "certain":
                request.expected = answers
        self.process = SimpleNamespace(poll=lambda: None)

    def __enter__(self) -> "FakeServer":
        self._loop, ready = asyncio.new_event_loop(), threading.Event()

        async def serve() -> None:
            app = web.Application()
            app.router.add_post("/v1/completions", self._answer)
            runner = web.AppRunner(app, shutdown_timeout=0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0]
            self.url, self._end = f"http://{host}:{port}", asyncio.Event()
            ready.set()
            await self._end.wait()
            await runner.cleanup()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),))
        self._thread.start()
        assert ready.wait(60)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()

    def total(self, name: str) -> float:
        return 0.0

    def resident_megabytes(self) -> dict[str, float]:
        return {"api": 0.0, "engine": 0.0}

    async def _answer(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        known = self._known.get(_key(body))
        if known is None:
            return web.Response(status=400, text="odd requests are refused")
        request, answers = known
        choices = [
            {
                "index": i,
                "text": answer.text,
                "token_ids": list(answer.ids),
                "finish_reason": answer.finish,
            }
            for i, answer in enumerate(answers)
        ]
        if body["stream"]:
            return await self._stream(http, choices)
        fault = self._fault("wrong", "hung", "error", "lost")
        if fault == "hung":
            await self._end.wait()
        if fault == "error":
            return web.Response(status=500, text="the test's own fault")
        if fault == "wrong":
            _spoil(request, choices[-1])
        text = json.dumps({"choices": choices})
        text = text[:-2] if fault == "lost" else text
        return web.Response(text=text, content_type="application/json")

    async def _stream(self, http: web.Request, choices: list[dict]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(http)
        for choice in choices:
            whole = choice["token_ids"]
            for t, token in enumerate(whole):
                last = t == len(whole) - 1
                part = {
                    **choice,
                    "text": choice["text"] if last else "",
                    "token_ids": [token],
                    "finish_reason": choice["finish_reason"] if last else None,
                }
                await response.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
        if self._fault("cut") is None:
            await response.write(b"data: [DONE]\n\n")
        return response

    def _fault(self, *kinds: str) -> str | None:
        """The fault of the next answer."""
        for kind in kinds:
            self._seen[kind] += 1
            if kind in self.every and self._seen[kind] % self.every[kind] == 0:
                self.faults[kind] += 1
                return kind
        return None


def _key(body: dict) -> str:
    kept = {key: value for key, value in body.items() if key not in ("stream", "priority")}
    return json.dumps(json.loads(json.dumps(kept)), sort_keys=True)


def _spoil(request: SoakRequest, choice: dict) -> None:
    """Change one token, leave one out, or break a constraint."""
    if request.kind == "structured":
        choice["token_ids"] = [*TOKENIZER.encode(INVALID), EOS]
    elif request.kind == "sampled":
        choice["token_ids"].pop()
    else:
        choice["token_ids"][0] += 1
