"""Servers of a model that is a table, which speak the protocols of vLLM, SGLang and llama.cpp."""

import itertools
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

VOCABULARY = 30
LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)) * 1.5


def logprobs_after(token: int, count: int) -> list[tuple[int, float]]:
    """(token, log-probability) of the likeliest tokens."""
    row = LOGITS[token] - np.log(np.exp(LOGITS[token]).sum())
    return [(int(each), float(row[each])) for each in (-row).argsort()[:count]]


class Handler(BaseHTTPRequestHandler):
    """A model that is a table; every token is the likeliest one `wrong` of the time too often."""

    wrong = 0.0
    owner = ""
    incremental = False
    max_logprobs = 20
    sends_token_ids = True
    ends = b"data: [DONE]\n\n"
    # Numbers of unseeded answers by the last token of their prompt: the same texts in every run.
    unseeded: defaultdict[int, itertools.count]

    def log_message(self, *_):
        pass

    def do_GET(self):
        found = {
            "/v1/models": {"data": [{"id": "/models/markov", "owned_by": self.owner}]},
            "/get_server_info": {"version": "0.5"},
            "/props": {"build_info": "b1"},
            "/version": {"version": "0"},
        }
        self.answer(found[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        getattr(self, self.path.strip("/").replace("-", "_").replace("/", "_"))(body)

    def apply_template(self, body):
        self.answer({"prompt": "<user>" + body["messages"][0]["content"]})

    def tokenize(self, body):
        key = "content" if self.owner == "llamacpp" else "prompt"
        text = body["messages"][0]["content"] if "messages" in body else body[key]
        assert isinstance(text, str)
        self.answer({"tokens": [len(text) % VOCABULARY, 3]})

    def generate(self, body):
        """SGLang's."""
        prompt, sampling = body["input_ids"], body["sampling_params"]
        if body.get("stream"):
            seed = sampling.get("sampling_seed")
            sent: list[int] = []
            for new in self.steps(prompt[-1], sampling["max_new_tokens"], sampling, seed):
                sent += new
                ids = new if self.incremental else sent
                meta = {"completion_tokens": len(sent), "finish_reason": None}
                self.event({"text": "", "output_ids": ids, "meta_info": meta})
            self.wfile.write(b"data: [DONE]\n\n")
            return
        start, wanted = body["logprob_start_len"], body["top_logprobs_num"]
        top: list = [None]
        own: list = [[None, prompt[start], None]]
        for last, token in itertools.pairwise(prompt[start:]):
            every = dict(logprobs_after(last, VOCABULARY))
            top.append([[lp, each, None] for each, lp in logprobs_after(last, wanted)])
            own.append([every[token], token, None])
        meta = {"input_top_logprobs": top, "input_token_logprobs": own}
        self.answer({"text": "", "output_ids": [0], "meta_info": meta})

    def completion(self, body):
        """llama.cpp's."""
        assert body["temperature"] == 0 or body["min_p"] == 0
        prompt = body["prompt"]
        if body.get("stream"):
            seed = None if body["seed"] < 0 else body["seed"]
            for new in self.steps(prompt[-1], body["n_predict"], body, seed):
                self.event({"content": "", "tokens": new, "stop": False})
            self.event({"content": "", "tokens": [], "stop": True})
            return
        row = [{"id": i, "logprob": lp} for i, lp in logprobs_after(prompt[-1], body["n_probs"])]
        self.answer({"completion_probabilities": [{"id": row[0]["id"], "top_logprobs": row}]})

    def v1_completions(self, body):
        """vLLM's."""
        body = {"top_p": 0.8, **body}  # as of a model's generation_config.json
        prompt, wanted = body["prompt"], body.get("prompt_logprobs")
        if body.get("stream"):
            for new in self.steps(prompt[-1], body["max_tokens"], body, body.get("seed")):
                self.event({"choices": [{"token_ids": new if self.sends_token_ids else None}]})
            self.wfile.write(self.ends)
        elif wanted > self.max_logprobs:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"prompt_logprobs is above max_logprobs")
        else:
            rows: list = [None]
            for last, token in itertools.pairwise(prompt):
                every = logprobs_after(last, VOCABULARY)
                kept = dict(every[:wanted]) | {token: dict(every)[token]}
                rows.append({str(each): {"logprob": logprob} for each, logprob in kept.items()})
            self.answer({"choices": [{"prompt_logprobs": rows}]})

    def steps(self, last: int, left: int, params: dict, seed: int | None) -> Iterator[list[int]]:
        number = (last, next(self.unseeded[last])) if seed is None else seed
        rng, first = np.random.default_rng(number), True
        self.send_response(200)
        self.end_headers()
        while left:
            new = []
            for _ in range(1 if first else int(rng.integers(1, 1 + min(left, 4)))):
                last = self.draw(last, params, rng)
                new.append(last)
            left, first = left - len(new), False
            yield new

    def draw(self, last: int, params: dict, rng: np.random.Generator) -> int:
        if params["temperature"] == 0 or rng.random() < self.wrong:
            return int(LOGITS[last].argmax())
        order = (-LOGITS[last]).argsort()[: params["top_k"]]
        probs = np.exp(LOGITS[last][order] / params["temperature"])
        probs /= probs.sum()
        probs *= np.cumsum(probs) - probs < params.get("top_p", 1)
        return int(rng.choice(order, p=probs / probs.sum()))

    def event(self, document):
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

    def answer(self, document):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())


def stand_in(owner: str, wrong: float = 0.0, **attributes) -> AbstractContextManager[str]:
    """URL of a server whose every token is the likeliest one, `wrong` of the time more than due."""
    own = {"owner": owner, "wrong": wrong, "unseeded": defaultdict(itertools.count), **attributes}
    return listening(type("Speaking", (Handler,), own))


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of this process, with room for many clients at once."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
