"""The benchmark of a load that swings: phases, what was chosen, the figure; without engines."""

import math
from types import SimpleNamespace

from benchmarks.end_to_end import adaptive
from vllm_hsd.engine import Generation

NAMES = ["no speculation", "fixed", "adaptive"]


class FakeEngines:
    """Engines twice as fast with drafts, which half of the steps get."""

    def get(self, index):
        self.index = index
        return self

    def generate(self, prompts, params):
        count = len(prompts)
        seconds = 1.0 if self.index else 2.0
        levels = [{"requested": 8.0, "empty": 4.0, "drafted": 16.0}] if self.index else []
        ids = [[1] * params["max_tokens"]] * count
        return Generation(ids, [""] * count, seconds, seconds, [], [], [], levels=levels)


def test_phases_and_what_was_chosen(tmp_path):
    options = SimpleNamespace(streams=[1, 4, 1], answers=2, max_tokens=3, temperature=0.0)
    rows = adaptive.measure(FakeEngines(), NAMES, [[n] for n in range(5)], options)
    assert [row["streams"] for row in rows] == [1] * 3 + [4] * 3 + [1] * 3
    assert [row["over_no_speculation"] for row in rows] == [1, 2, 2] * 3
    assert math.isnan(rows[0]["draft_length"])
    assert (rows[1]["draft_length"], rows[1]["no_draft"]) == (2, 0.5)
    adaptive.plot(rows, NAMES, "title", tmp_path / "adaptive.png")
    assert (tmp_path / "adaptive.png").read_bytes().startswith(b"\x89PNG")


def test_configurations_begin_without_speculation_and_share_their_length():
    first, *others = adaptive.configurations().values()
    assert first is None
    assert len({config["num_speculative_tokens"] for config in others}) == 1
    assert [config.get("adaptive", False) for config in others] == [False, True, True]
