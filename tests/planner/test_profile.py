"""The profile file: round trip, warnings, and files that cannot be planned with."""

import json

import numpy as np
import pytest

from vllm_hsd.errors import UserError
from vllm_hsd.planner import profile
from vllm_hsd.planner.costs import Costs, TimeTable
from vllm_hsd.planner.laws import Laws
from vllm_hsd.planner.recorded import survival_by_position, visited_survival


def flat(ms):
    return TimeTable(batch_sizes=[1], tokens=[1], ms=[[ms]])


@pytest.fixture
def raw():
    """A valid file's content: two candidates and the target, rates only."""
    costs = Costs(forward=[flat(0.5), flat(1.0), flat(5.0)])
    return {
        "schema": 2,
        "target": "models/target",
        "candidates": [
            {"name": "small", "model": "models/small"},
            {"name": "exit 2", "early_exit": 2},
        ],
        "max_tokens": 8,
        "rates": [[1, 0.7, 0.6], [0.7, 1, 0.8], [0.6, 0.8, 1]],
        "costs": costs.model_dump(exclude_none=True),
    }


def written(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    return path


def test_a_profile_by_hand_needs_rates_and_costs_only(tmp_path, raw):
    loaded = profile.load_profile(written(tmp_path, raw))
    assert loaded.names == ["small", "exit 2", "target"]
    tables = loaded.survival_tables("block")
    assert tables.shape == (3, 3, 9, 9, 9)
    assert tables[2, 0, 4, 0, :5] == pytest.approx(0.6 ** np.arange(5))
    assert profile.environment_warnings(loaded) == []


def test_round_trip_of_a_measured_profile(tmp_path, raw):
    ratios = np.log(np.random.default_rng(0).uniform(0.3, 1.5, size=(3, 10, 20)))
    table = np.full((3, 3, 5, 5, 5), np.nan)
    table[2, :2] = visited_survival(ratios[:2], 4, "block")[:, :, None]
    table[1, 0] = survival_by_position(ratios[2, :, :4], 4, "block")
    laws = Laws(
        rates=np.array(raw["rates"]),
        rate_errors=np.full((3, 3), 0.01),
        survival={"block": table, "standard": table},
        entropies=np.arange(18.0).reshape(3, 6),
        positions=200,
    )
    made = profile.from_laws(
        laws,
        target="models/target",
        candidates=[profile.Candidate(**c) for c in raw["candidates"]],
        settings=profile.Settings(temperature=0.7, top_p=0.9),
        prompts=profile.Prompts(file="p.jsonl", prompts=10, contexts=200),
        costs=Costs(**raw["costs"]),
    )
    path = tmp_path / "profile.json"
    made.save(path)
    loaded = profile.load_profile(path)
    assert loaded == made
    assert json.loads(path.read_text())["schema"] == 2
    tables = loaded.survival_tables("standard")
    assert tables[2, 1] == pytest.approx(table[2, 1], abs=1e-6)
    assert tables[1, 0] == pytest.approx(table[1, 0], abs=1e-6)
    assert np.ptp(tables[1, 0, 4, :4, 1]) > 0.01
    assert tables[0, 1, 3, 2].tolist() == [1, 0, 0, 0, 0]  # not measured
    assert loaded.entropies[1].quantiles["0.5"] == 9.0
    assert loaded.versions["torch"] and loaded.machine["cores"] >= 1


def test_another_vllm_and_another_machine_are_named(tmp_path, raw):
    raw["versions"] = {"vllm": "0.1.0"}
    raw["machine"] = profile.machine() | {"processor": "Abacus 9"}
    loaded = profile.load_profile(written(tmp_path, raw))
    version, processor = profile.environment_warnings(loaded)
    assert "vLLM 0.1.0 and this is vLLM" in version
    assert "processor Abacus 9 and this machine has" in processor
    assert profile.machine()["processor"] in processor


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["schema"], 1, 'lacks "schema": 2'),
        (["rates", 0, 2], 1.2, r"small and target is 1\.2, outside \[0, 1\]"),
        (["rates", 0, 2], None, "small and target is missing"),
        (["rates", 0, 2], 0.1, "0.1 one way and 0.6 the other"),
        (["rates"], [[1, 0.7], [0.7, 1]], "rates must be 3 x 3"),
        (["rates"], [[1, 0.9, 0.1], [0.9, 1, 0.9], [0.1, 0.9, 1]], "triangle inequality"),
        (["costs", "forward", 1, "ms", 0, 0], 0, "a cost of exit 2 is 0, not above 0"),
        (["costs", "forward", 2, "ms", 0, 0], -3, "a cost of target is -3"),
        (["costs", "forward", 0, "ms", 0, 0], float("nan"), "a cost of small is nan"),
        (["costs", "plain"], flat(0.0).model_dump(), "a cost of plain is 0, not above 0"),
        (
            ["costs", "overhead"],
            {"draft": flat(-0.1).model_dump()},
            "a cost of overhead.draft is -0.1",
        ),
        (["rates", 0, 2], -0.2, r"small and target is -0\.2, outside \[0, 1\]"),
        (["rates", 0, 2], "high", "key 'rates.0.2': "),
        (["costs", "forward"], [], "costs.forward must have 3 entries"),
        (["costs", "forward", 0, "tokens"], [2, 1], "tokens must be ascending"),
        (["candidates"], [], "candidates must name at least one drafter"),
        (["candidates", 0], {"name": "x"}, "exactly one of 'model' and 'early_exit'"),
        (["max_tokens"], 0, "key 'max_tokens': "),
        (["survival"], {"standard": [[None] * 3] * 2}, "survival.standard must be 3 x 3"),
        (["survival"], {"standard": [[[[[1.0]]]] * 3] * 3}, "rows of 1 to 8 values at position 0"),
        (["survival"], {"standard": [[[[[1.0]]] * 2] * 3] * 3}, "must have 1 or 8 positions"),
        (
            ["survival"],
            {"standard": [[[[[1.1] * n for n in range(1, 9)]]] * 3] * 3},
            r"of small under small has a value outside \[0, 1\]",
        ),
        (["nonsense"], 1, "key 'nonsense': "),
    ],
)
def test_files_that_cannot_be_planned_with(tmp_path, raw, path, value, message):
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(UserError, match=message) as error:
        profile.load_profile(written(tmp_path, raw))
    text = str(error.value)
    assert text.startswith("the profile") and text.endswith(".") and "\n" not in text


def test_no_file_and_no_json(tmp_path):
    with pytest.raises(UserError, match=r"no profile .*; `vllm-hsd profile` writes one"):
        profile.load_profile(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        profile.load_profile(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match='lacks "schema": 2'):
        profile.load_profile(tmp_path / "list.json")
    (tmp_path / "binary.json").write_bytes(b"\x80\x02")
    with pytest.raises(UserError, match=r"binary.json' cannot be read \("):
        profile.load_profile(tmp_path / "binary.json")
