"""What the study of entropies reads off a verdict."""

from benchmarks.studies.entropies import WAYS, draw, summary


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
