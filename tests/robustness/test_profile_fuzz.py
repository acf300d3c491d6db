"""Damaged profiles: each is read as a valid one or refused in one sentence."""

import hashlib
import json
import random

import numpy as np
from support.damaged_bytes import COUNT, damaged, objection, objections
from support.plain_profile import plain_profile

from vllm_hsd.tools.planner.profile import Profile, load_profile, tables_file


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


def test_damaged_tables_whose_digest_fits(tmp_path):
    """A NaN in them is what `test_profile_files` sees refused."""
    rng, path = np.random.default_rng(0), tmp_path / "profile.json"
    made = Profile(**plain_profile() | {"tables": ""})
    survival = -np.sort(-rng.random((3, 3, 5, 5, 5)), axis=-1)
    made.set_tables({"block": survival, "standard": survival / 2})
    made.save(path)
    tables, content = tables_file(path), json.loads(path.read_text())
    whole, change = tables.read_bytes(), random.Random(0)
    for _ in range(COUNT):
        tables.write_bytes(damaged(change, whole))
        digest = hashlib.sha256(tables.read_bytes()).hexdigest()
        path.write_text(json.dumps({**content, "tables": digest}))
        assert objection(load_profile, is_profile, path) is None
