"""Damaged profiles: each is read as a valid one or refused in one sentence."""

import copy
import hashlib
import json
import random
import zipfile

import numpy as np
import pytest
from support.cascade_mutations import JUNK
from support.damaged_bytes import COUNT, damaged, objection, objections, write_members
from support.plain_profile import plain_profile

from vllm_hsd.errors import UserError
from vllm_hsd.planner import profile
from vllm_hsd.planner.profile import Profile, load_profile


def is_profile(found: Profile) -> bool:
    """Whether the planner meets probabilities and positive times only."""
    rates = found.rate_matrix()
    known = rates[~np.isnan(rates)]
    acceptances = [found.acceptance(verifier) for verifier in ("block", "standard")]
    tables = [table for a in acceptances for table in (a.survival, *a.lookups.values())]
    forwards = found.latencies.forward if found.latencies else []
    times = np.array([ms for table in forwards for row in table.ms for ms in row])
    return (
        len(rates) == len(found.names)
        and bool(((known >= 0) & (known <= 1)).all())
        and all(((table >= 0) & (table <= 1.001)).all() for table in tables)
        and bool((np.isfinite(times) & (times > 0)).all())
    )


def test_profiles_with_damaged_bytes(tmp_path):
    content = json.dumps(plain_profile()).encode()
    assert objections(load_profile, is_profile, content, tmp_path) == []


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Paths to all values inside nested mappings and lists."""
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return [path]
    below = [place for key in keys for place in places(value[key], (*path, key))]
    return [path, *below] if path else below


def test_profiles_with_other_values(tmp_path):
    rng, whole, accepted = random.Random(0), plain_profile(), 0
    junk = [value for value in JUNK if is_json(value)]
    for i in range(COUNT):
        content = copy.deepcopy(whole)
        *path, last = rng.choice(places(whole))
        inner = content
        for key in path:
            inner = inner[key]
        inner[last] = rng.choice(junk)
        file = tmp_path / f"profile-{i}.json"
        file.write_text(json.dumps(content))
        assert objection(load_profile, is_profile, file) is None, content
        accepted += is_accepted(file)
    assert 0 < accepted < COUNT / 2


def is_json(value: object) -> bool:
    try:
        return len(json.dumps(value)) < 1 << 20
    except (TypeError, ValueError, RecursionError):
        return False


def is_accepted(file) -> bool:
    try:
        load_profile(file)
    except UserError:
        return False
    return True


@pytest.fixture
def with_tables(tmp_path):
    """A profile with tables, and its .npz file."""
    rng = np.random.default_rng(0)
    made = Profile(**plain_profile() | {"tables": ""})
    survival = -np.sort(-rng.random((3, 3, 5, 5, 5)), axis=-1)
    made.set_tables({"block": survival, "standard": survival / 2})
    made.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def sign(file) -> None:
    """Make the tables next to a profile its own."""
    content = json.loads(file.read_text())
    digest = hashlib.sha256(file.with_suffix(".npz").read_bytes()).hexdigest()
    file.write_text(json.dumps({**content, "tables": digest}))


def test_damaged_tables_whose_digest_fits(with_tables):
    rng, tables = random.Random(0), with_tables.with_suffix(".npz")
    whole = tables.read_bytes()
    with zipfile.ZipFile(tables) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    for i in range(COUNT):
        if i % 2:
            tables.write_bytes(damaged(rng, whole))
        else:
            name = rng.choice(sorted(members))
            write_members(tables, {**members, name: damaged(rng, members[name])})
        sign(with_tables)
        assert objection(load_profile, is_profile, with_tables) is None


def test_the_harness_catches_a_reader_that_lets_nan_through(with_tables, monkeypatch):
    def trusting(found: Profile, tables: dict) -> None:
        found._acceptance = {v: profile.Acceptance(tables[v], {}) for v in ("block", "standard")}

    with np.load(with_tables.with_suffix(".npz")) as stored:
        arrays = {key: stored[key].copy() for key in stored.files}
    arrays["block"][0, 0] = np.nan
    np.savez(with_tables.with_suffix(".npz"), **arrays)
    sign(with_tables)
    assert objection(load_profile, is_profile, with_tables) is None
    monkeypatch.setattr(Profile, "set_tables", trusting)
    assert objection(load_profile, is_profile, with_tables) == "accepts what is not valid"
