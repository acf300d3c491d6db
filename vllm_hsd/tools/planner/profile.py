"""The profile: what was measured on one machine, its tables in a second file."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.numpy import save_file

from vllm_hsd.checked_files import TensorHeader, read_json, read_tensors, written_whole
from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.levels import Level, Tokens
from vllm_hsd.tools import system
from vllm_hsd.tools.planner.latencies import Latencies
from vllm_hsd.tools.planner.survival import VERIFIERS, Acceptance, Verifier

Floats = NDArray[np.float64]

SCHEMA = 3
MAX_JSON_BYTES = 16 << 20
MAX_TABLE_BYTES = 1 << 30

Name = Annotated[str, Field(min_length=1, max_length=4096)]
Rate = Annotated[float, Field(ge=0, le=1)] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)


class Candidate(_Strict):
    """A possible level of a cascade: a level's keys without a draft length."""

    name: Name
    level: Level

    @property
    def is_lookup(self) -> bool:
        """It offers point masses, at most as many as are requested: a lookup, or several."""
        return all(drafter.is_lookup for drafter in self.level.drafters)

    @model_validator(mode="after")
    def _can_be_planned(self) -> Candidate:
        if getattr(self.level, "branches", 1) > 1:
            raise ValueError(
                "has 'branches', of which a profile of single drafts knows nothing: compare it by "
                "`vllm-hsd bench`"
            )
        if self.level.kind == "sources" and not self.is_lookup:
            raise ValueError(
                "has 'sources' that are not all lookups, chosen by prices of serving: compare it "
                "by `vllm-hsd bench`"
            )
        return self

    def keys(self) -> dict[str, Any]:
        """The level as a user writes it in a configuration."""
        return self.level.model_dump(exclude_unset=True)


class Prompts(_Strict):
    """The text that acceptance was measured on; `file` is empty where the target wrote freely."""

    file: str
    prompts: int
    contexts: int


class Sampling(_Strict):
    """How probabilities are made from logits: softmax of logits / temperature, then top-p.

    Temperature 0 is greedy: all mass on the largest logit.
    """

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Profile(_Strict):
    """Latencies and acceptance of M candidates and the target; matrices have the target last.

    Attributes:
        rates: acceptance rate of every pair, [M + 1, M + 1]; null where one is a prompt lookup,
            which has no distribution of its own.
        tables: SHA-256 of the .safetensors file next to the profile, which holds `table_shapes`;
            empty before it is saved.
        latencies: absent as long as they have not been measured.
    """

    schema_version: Literal[3] = Field(3, alias="schema")
    created: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, str | int] = Field(default_factory=dict)
    target: Name
    candidates: Annotated[list[Candidate], Field(min_length=1, max_length=256)]
    sampling: Sampling = Field(default_factory=Sampling)
    prompts: Prompts | None = None
    max_draft_tokens: Tokens
    rates: list[list[Rate]]
    tables: str
    latencies: Latencies | None = None
    _tables: dict[str, Floats] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        models = len(self.candidates) + 1
        if len(self.rates) != models or any(len(row) != models for row in self.rates):
            raise ValueError(f"rates must be {models} x {models}: candidates, then the target")
        check_table_size(models, len(self.lookups), self.max_draft_tokens)
        if self.latencies is not None and len(self.latencies.forward) != models:
            raise ValueError(
                f"latencies.forward must have {models} entries: candidates, then the target"
            )
        for key, tables in self.latencies.tables().items() if self.latencies else ():
            names = self.names if key == "forward" else [key]
            for name, table in zip(names, tables, strict=True):
                for ms in itertools.chain(*table.ms):
                    # What a level adds to its forward may vanish; a forward takes time.
                    if not (0 < ms < math.inf or (ms == 0 and key.startswith("overhead"))):
                        raise ValueError(f"a latency of {name} is {ms:g}, not above 0")
        return self

    @property
    def names(self) -> list[str]:
        """Names of the candidates, then of the target."""
        return [*(candidate.name for candidate in self.candidates), Path(self.target).name]

    @property
    def lookups(self) -> list[int]:
        """Indices of the candidates that are prompt lookups."""
        return [i for i, candidate in enumerate(self.candidates) if candidate.is_lookup]

    def rate_matrix(self) -> Floats:
        """The rates as float64 [M + 1, M + 1]; nan where one is a prompt lookup."""
        return np.array([[np.nan if r is None else r for r in row] for row in self.rates])

    def acceptance(self, verifier: Verifier) -> Acceptance:
        """Acceptance under one verifier; pairs that were not measured accept nothing."""
        lookups = {i: self._tables[f"lookup{i}"] for i in self.lookups}
        return Acceptance(self._tables[verifier], lookups)

    def set_tables(self, tables: dict[str, Floats]) -> None:
        """Take in survival tables by verifier and, by name, those of lookups; UserError for an
        impossible value.
        """
        for key in tables:
            if not np.all((tables[key] >= 0) & (tables[key] <= 1.001)):
                raise UserError(f"table {key} has a value outside [0, 1].")
        for i in self.lookups:
            if not np.allclose(tables[f"lookup{i}"].sum((-2, -1)), 1, atol=1e-3):
                raise UserError(f"table lookup{i} does not sum to 1.")
        self._tables = tables

    def save(self, path: str | Path) -> None:
        """Write the file and, before it, its tables; each whole or not at all."""
        path = Path(path)
        with written_whole(tables_file(path)) as unfinished:
            stored = {k: each.astype(np.float32, "C") for k, each in self._tables.items()}
            save_file(stored, unfinished)
            self.tables = _digest(unfinished)
        text = self.model_dump_json(by_alias=True, exclude_none=True)
        with written_whole(path) as unfinished:
            unfinished.write_text(text + "\n")


def table_shapes(
    models: int, lookups: Sequence[int], max_tokens: int
) -> dict[str, tuple[int, ...]]:
    """Shape of every table of a profile of `models` models, the target included."""
    size = max_tokens + 1
    shapes: dict[str, tuple[int, ...]] = {v: (models, models, *[size] * 3) for v in VERIFIERS}
    return shapes | {f"lookup{i}": (models, *[size] * 4) for i in lookups}


def check_table_size(models: int, lookups: int, max_tokens: int) -> None:
    """Refuse tables that would take too much memory, with a UserError that says what helps."""
    shapes = table_shapes(models, range(lookups), max_tokens)
    size = sum(8 * math.prod(shape) for shape in shapes.values())
    if size > MAX_TABLE_BYTES:
        raise UserError(
            f"{models - 1} candidates with drafts of {max_tokens} tokens need tables of "
            f"{size / 2**30:.1f} GiB: lower --max-draft-tokens or give fewer candidates."
        )


def real_path(value: object) -> object:
    """An existing path without links and `~`, to compare it; any other value as it is."""
    if isinstance(value, str) and os.path.exists(path := os.path.expanduser(value)):
        return os.path.realpath(path)
    return value


def load_profile(path: str | Path) -> Profile:
    """Read and check a profile and its tables.

    Raises:
        UserError: no such file, not a profile of this schema, or impossible values; one sentence
            that names the key.
    """
    path = Path(path)
    where = f"profile {quoted(str(path))}"
    raw = read_json(path, "profile", "vllm-hsd profile", MAX_JSON_BYTES)
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if type(schema) is not int or schema != SCHEMA:
        raise UserError(
            f'{where} lacks "schema": {SCHEMA}; write it with this version\'s vllm-hsd profile.'
        )
    try:
        profile = Profile.model_validate(raw)
        profile.set_tables(_read_tables(tables_file(path), profile))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        text = brief(fault["msg"].removeprefix("Value error, "))
        if key:
            text = f"key '{brief(key)}': {text}"
        raise UserError(f"{where}: {text}.") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return profile


def tables_file(path: Path) -> Path:
    """The file of a profile's tables."""
    return path.with_suffix(".safetensors")


def partial_directory(path: Path) -> Path:
    """Where the measurements of a profile lie until it is written."""
    return path.with_name(path.name + ".partial")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_tables(path: Path, profile: Profile) -> dict[str, Floats]:
    """The arrays of the tables' file; their shapes are checked before memory is taken."""
    shapes = table_shapes(len(profile.names), profile.lookups, profile.max_draft_tokens)

    def check(header: TensorHeader) -> None:
        for key, shape in shapes.items():
            found = header.types[key], header.shapes[key]
            if found != ("F32", shape):
                raise ValueError(f"table {key} has the shape {brief(found)}, not {shape}")
        if _digest(path) != profile.tables:
            raise ValueError("it belongs to another profile")

    def blame(reason: str) -> str:
        return (
            f"{quoted(path.name)} does not hold its tables ({reason}): profile again, or move both "
            "files together."
        )

    _, found = read_tensors(path, shapes, check, blame)
    return {key: table.astype(np.float64) for key, table in found.items()}


def measurement_warnings(profile: Profile) -> list[str]:
    """One sentence for each way in which the machine was disturbed while its times were taken."""
    load = profile.latencies and profile.latencies.load
    return load.sentences("gpu" not in profile.machine) if load else []


def environment_warnings(profile: Profile) -> list[str]:
    """One sentence for each way in which the profile was measured elsewhere."""
    found = []
    then, now = profile.versions.get("vllm"), system.versions().get("vllm")
    if then and now and then != now:
        found.append(f"vLLM {then} and this is vLLM {now}")
    for key, here in system.machine().items():
        there = profile.machine.get(key)
        if profile.machine and there != here:
            found.append(f"{key} {there or 'none'} and this machine has {here}")
    return [f"the profile was measured with {each}: times may differ." for each in found]
