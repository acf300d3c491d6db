"""The benchmark of a load that swings: phases, what was chosen, the figure; without engines."""

import math
from types import SimpleNamespace

from benchmarks.end_to_end import adaptive, streams

NAMES = ["no speculation", "fixed", "adaptive"]


class FakeEngines:
    """Engines twice as fast with drafts, which half of the steps get."""

    def get(self, index):
        self.index = index
        return self

    def call(self, function, prompts, count, seconds, params):
        assert function is streams.keep_streams
        levels = [{"requested": 8.0, "empty": 4.0, "drafted": 16.0}] if self.index else []
        faster = 2 if self.index else 1
        return streams.Served(count * 10 * faster, seconds, [0.1], [0.1 / faster], levels)


class FakeEngine:
    """Every step gives every request two tokens, until it has six."""

    def __init__(self):
        self.running, self.prompts, self.aborted, self.given = {}, [], [], 0

    def add_request(self, name, prompt, params):
        self.running[name] = 0
        self.prompts.append(prompt["prompt_token_ids"])

    def step(self):
        found = []
        for name in list(self.running):
            self.running[name] += 2
            self.given += 2
            ended = self.running[name] == 6
            output = SimpleNamespace(token_ids=[1, 2])
            found.append(SimpleNamespace(request_id=name, outputs=[output], finished=ended))
            if ended:
                del self.running[name]
        return found

    def abort_request(self, names):
        self.aborted = names
        self.running.clear()

    def has_unfinished_requests(self):
        return bool(self.running)


def test_phases_and_what_was_chosen(tmp_path):
    options = SimpleNamespace(streams=[1, 4, 1], seconds=2.0, max_tokens=3, temperature=0.0)
    rows = adaptive.measure(FakeEngines(), NAMES, [[n] for n in range(5)], options)
    assert [row["streams"] for row in rows] == [1] * 3 + [4] * 3 + [1] * 3
    assert [row["over_no_speculation"] for row in rows] == [1, 2, 2] * 3
    assert [row["per_token_over_no_speculation"] for row in rows] == [1, 0.5, 0.5] * 3
    assert math.isnan(rows[0]["draft_length"])
    assert (rows[1]["draft_length"], rows[1]["no_draft"]) == (2, 0.5)
    adaptive.plot(rows, NAMES, "title", tmp_path / "adaptive.png")
    assert (tmp_path / "adaptive.png").read_bytes().startswith(b"\x89PNG")


def test_as_a_request_ends_the_next_one_starts(monkeypatch):
    engine, clock = FakeEngine(), iter(range(1000))
    monkeypatch.setattr(streams.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("vllm_hsd.engine.vllm_params", lambda llm, params: params)
    llm = SimpleNamespace(llm_engine=engine)
    served = streams.keep_streams(llm, [[1], [2], [3]], 2, 21.0, {})
    assert engine.prompts[:4] == [[1], [2], [3], [1]]
    assert len(engine.aborted) == 2 and not engine.running
    assert served.num_tokens == engine.given
    assert served.seconds >= 21.0
    # Of the two that were aborted before their first token nothing is known.
    assert len(served.first_token) == len(served.per_token) == len(engine.prompts) - 2
    assert min(served.per_token) > 0 and served.levels == []


def test_configurations_begin_without_speculation_and_share_their_length():
    first, *others = adaptive.configurations().values()
    assert first is None
    assert len({config["num_speculative_tokens"] for config in others}) == 1
    assert [config.get("adaptive", False) for config in others] == [False, True, True]
