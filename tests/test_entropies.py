"""What the study of entropies reads off a verdict."""

import numpy as np
import pytest

from benchmarks.studies.entropies import WAYS, draw, summary, verdict
from vllm_hsd.core.drafts import DraftStore
from vllm_hsd.core.rounds import Round


def test_a_verdict_gives_counts_and_entropies():
    drafts = DraftStore(2, 4)
    drafts.counts[1] = 3
    drafts.entropy[1, :3] = 0.5, 1.5, 2.5

    def told(accepted):
        slots = np.array([1])
        return verdict(Round(0, 1, slots, drafts, accepted=np.array([accepted])))

    assert told(2) == {
        "drafted": 3, "accepted": 2, "entropy_accepted": 1.0, "entropy_rejected": 2.5,
    }  # fmt: skip
    assert np.isnan(told(3)["entropy_rejected"]) and np.isnan(told(0)["entropy_accepted"])


def test_verdicts_are_drawn_and_averaged(tmp_path):
    rows = [
        {
            "way": way, "temperature": 0.0, "question": 0, "category": "math", "turn": turn,
            "drafted": 2, "accepted": turn - 1, "entropy_accepted": 0.5,
            "entropy_rejected": float("nan"),
        }
        for way in WAYS
        for turn in (1, 2)
    ]  # fmt: skip
    draw(rows, tmp_path / "entropies.png")
    assert (tmp_path / "entropies.png").read_bytes().startswith(b"\x89PNG")
    assert list(summary(rows, "turn"))[2] == f"| {WAYS[0]}, 0 | 1.00 | 2.00 |"


def test_a_draft_of_several_requests_is_refused():
    drafts = DraftStore(2, 4)
    with pytest.raises(ValueError):
        verdict(Round(0, 1, np.array([0, 1]), drafts, accepted=np.array([0, 0])))
