"""An OpenAI server, as far as `verify --url` needs one, whose model is a table: no engine."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

VOCABULARY = 30
LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY, VOCABULARY)) * 1.5


@contextlib.contextmanager
def markov_server(
    wrong: float = 0.0, max_logprobs: int = 20, sends_token_ids: bool = True
) -> Iterator[str]:
    """URL of a server whose every token is the likeliest one, `wrong` of the time more than due."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            models = {"data": [{"id": "markov"}]}
            self.answer({"/v1/models": models, "/version": {"version": "0"}}[self.path])

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/tokenize":
                text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
                self.answer({"tokens": [len(text) % VOCABULARY, 3]})
            elif body.get("stream"):
                self.stream(body)
            elif body["prompt_logprobs"] > max_logprobs:
                self.answer({"error": "prompt_logprobs is above max_logprobs"}, 400)
            else:
                self.answer({"choices": [{"prompt_logprobs": likeliest(body)}]})

        def stream(self, body):
            rng = np.random.default_rng(body.get("seed"))
            self.send_response(200)
            self.end_headers()
            last, left, first = body["prompt"][-1], body["max_tokens"], True
            while left:
                token_ids = []
                for _ in range(1 if first else int(rng.integers(1, 1 + min(left, 4)))):
                    last = draw(LOGITS[last], body, rng, wrong)
                    token_ids.append(last)
                left, first = left - len(token_ids), False
                event = {"choices": [{"token_ids": token_ids if sends_token_ids else None}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def answer(self, document, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(document).encode())

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def draw(logits: np.ndarray, body: dict, rng: np.random.Generator, wrong: float) -> int:
    """A token by temperature, then top_k, then top_p."""
    if body["temperature"] == 0 or rng.random() < wrong:
        return int(logits.argmax())
    order = (-logits).argsort()[: body["top_k"]]
    probs = np.exp((logits[order] - logits[order[0]]) / body["temperature"])
    probs /= probs.sum()
    probs *= np.cumsum(probs) - probs < body.get("top_p", 1)
    return int(rng.choice(order, p=probs / probs.sum()))


def likeliest(body: dict) -> list:
    """vLLM's `prompt_logprobs`."""
    rows = [None]
    for last, token in zip(body["prompt"], body["prompt"][1:], strict=False):
        logprobs = LOGITS[last] - np.log(np.exp(LOGITS[last]).sum())
        tokens = {*(-logprobs).argsort()[: body["prompt_logprobs"]].tolist(), token}
        rows.append({str(each): {"logprob": logprobs[each]} for each in tokens})
    return rows
