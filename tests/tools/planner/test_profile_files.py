"""The profile's files: round trip, warnings, and files that cannot be planned with."""

import json
from functools import reduce
from operator import getitem

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.plain_profile import plain_profile, with_tables

from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner import profile


def flat(ms):
    return {"batch_sizes": [1], "tokens": [1], "ms": [[ms]]}


def test_a_disturbed_machine_is_told():
    raw = plain_profile()
    quiet = with_tables(raw)
    assert quiet.names == ["small", "exit 2", "target"]
    assert profile.environment_warnings(quiet) == profile.measurement_warnings(quiet) == []
    raw["latencies"]["load"] = {"other_cores": 0.0, "steal": 0.5, "drift": 0.01}
    (stolen,) = profile.measurement_warnings(with_tables(raw))
    assert "the hypervisor took 50% of the processor time" in stolen


@pytest.fixture
def saved(tmp_path):
    """Path of a profile with tables: a model, a prompt lookup and the target."""
    raw, rng = plain_profile(), np.random.default_rng(0)
    survival = -np.sort(-rng.random((3, 3, 5, 5, 5)), axis=-1)
    joint = np.tril(rng.random((3, 5, 5, 5, 5)))
    raw["candidates"][0] = {"name": "ngram 4", "level": {"ngram": {"max": 4}}}
    raw["rates"] = [[None] * 3, [None, 1, 0.8], [None, 0.8, 1]]
    made = profile.Profile(**raw)
    tables = {"block": survival, "standard": survival / 2}
    made.set_tables({**tables, "lookup0": joint / joint.sum((-2, -1), keepdims=True)})
    made.save(tmp_path / "profile.json")
    return tmp_path / "profile.json", made


def test_round_trip_with_tables(saved):
    path, made = saved
    loaded = profile.load_profile(path)
    assert loaded.model_dump() == made.model_dump() and loaded.lookups == [0]
    for verifier in ("block", "standard"):
        ours, theirs = made.acceptance(verifier), loaded.acceptance(verifier)
        assert np.allclose(ours.survival, theirs.survival, atol=1e-6)
        assert np.allclose(ours.lookups[0], theirs.lookups[0], atol=1e-6)
    assert np.isnan(loaded.rate_matrix()[0]).all() and loaded.rate_matrix()[1, 2] == 0.8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("block"), "does not hold its tables"),
        (lambda a: a.update(block=a["block"][:2]), "table block has the shape"),
        (lambda a: a.update(block=a["block"].astype(np.float64)), "table block has the shape"),
        (lambda a: a["standard"].fill(1.1), r"table standard has a value outside \[0, 1\]"),
        (lambda a: a["standard"].fill(np.nan), "table standard has a value outside"),
        (lambda a: a["lookup0"].fill(0.5), "table lookup0 does not sum to 1"),
    ],
)
def test_tables_that_cannot_be_planned_with(saved, change, message):
    path, _ = saved
    tables = profile.tables_file(path)
    arrays = load_file(tables)
    change(arrays)
    save_file(arrays, tables)
    # With a digest that fits.
    digest = profile.hashlib.sha256(tables.read_bytes()).hexdigest()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tables": digest}))
    with pytest.raises(UserError, match=message):
        profile.load_profile(path)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", 2, 'lacks "schema": 3'),
        ("schema", True, 'lacks "schema": 3'),
        ("rates.0.2", 1.2, "key 'rates.0.2': .* less than or equal to 1"),
        ("tables", None, "key 'tables': "),
        ("rates", [[1, 0.7], [0.7, 1]], "rates must be 3 x 3"),
        ("latencies.forward.1.ms.0.0", 0, "a latency of exit 2 is 0, not above 0"),
        ("latencies.forward.2.ms.0.0", -3, "a latency of target is -3"),
        ("latencies.forward.0.ms.0.0", float("nan"), "is not JSON"),
        ("latencies.forward.0.ms.0.0", True, "key 'latencies.forward.0.ms.0.0': "),
        ("latencies.plain", flat(0.0), "a latency of plain is 0, not above 0"),
        ("latencies.overhead", {"draft": flat(-0.1)}, "a latency of overhead.draft is -0.1"),
        ("rates.0.2", -0.2, "key 'rates.0.2': .* greater than or equal to 0"),
        ("rates.0.2", "high", "key 'rates.0.2': "),
        ("latencies.forward", [], "latencies.forward must have 3 entries"),
        ("latencies.forward.0.tokens", [2, 1], "tokens must be ascending"),
        ("candidates", [], "key 'candidates': "),
        ("candidates.0", {"name": "x"}, "key 'candidates.0.level': "),
        ("candidates.0.level", {}, "needs one of the kinds: bigram"),
        (
            "candidates.0.level",
            {"sources": [{"ngram": {}}, {"model": "m"}]},
            "has 'sources' that are not all lookups.*`vllm-hsd bench`",
        ),
        ("candidates.0.level", {"model": "m", "branches": 2}, "has 'branches'.*bench`"),
        ("max_draft_tokens", 0, "key 'max_draft_tokens': "),
        ("max_draft_tokens", 10**6, "key 'max_draft_tokens': "),
        ("target", "x" * 10**5, "key 'target': "),
        ("nonsense", 1, "key 'nonsense': "),
    ],
)
def test_files_that_cannot_be_planned_with(tmp_path, path, value, message):
    raw = plain_profile()
    *way, last = (int(key) if key.isdigit() else key for key in path.split("."))
    reduce(getitem, way, raw)[last] = value
    (tmp_path / "profile.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=message) as error:
        profile.load_profile(tmp_path / "profile.json")
    text = str(error.value)
    assert text.startswith("profile") and text.endswith(".") and "\n" not in text
    assert len(text) < 500


def test_files_that_are_not_profiles(tmp_path):
    with pytest.raises(UserError, match=r"no file .*; `vllm-hsd profile` writes one"):
        profile.load_profile(tmp_path / "missing.json")
    contents = {
        b"{": "is not JSON", b"[]": 'lacks "schema": 3', b"\x80\x02": "is not text in UTF-8",
        b"[" * 10**5: "is not JSON", b'{"schema": ' + b"9" * 5000 + b"}": "is not JSON",
    }  # fmt: skip
    for content, message in contents.items():
        (tmp_path / "profile.json").write_bytes(content)
        with pytest.raises(UserError, match=message):
            profile.load_profile(tmp_path / "profile.json")
