"""User-facing configuration: `--speculative-config` for method "hsd"; levels: `levels`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.checked_files import read_json
from vllm_hsd.config import platform
from vllm_hsd.errors import UserError, quoted
from vllm_hsd.levels import KINDS, Keys, Level, Tokens, Verifier
from vllm_hsd.levels.any_kind import with_underscores
from vllm_hsd.levels.base import TargetVerifier

MAX_LEVELS = 16
MAX_CASCADE_BYTES = 1 << 20
CASCADE_SCHEMA = 1


def _read_switch(raw: object) -> object:
    if not isinstance(raw, bool):
        raise ValueError(f"must be true or false (given: {quoted(raw)})")
    return raw


class CascadeConfig(Keys):
    """A cascade; build it with `CascadeConfig.parse`.

    Attributes:
        num_speculative_tokens: longest draft that the target verifies in one call.
        levels: drafters, cheapest first.
        verifier: how the target verifies, and every level that does not say otherwise. Sampled
            requests with a seed are always verified by coupling, with "coupled" the others too.
        horizontal_tokens: unverified tokens of level 0 after the top level's draft, a horizontal
            cascade (experimental).
        disable_by_batch_size: in steps with more requests than this nothing is drafted; None for
            64, where vLLM's own drafter serves for no limit.
        adaptive: select the levels and draft lengths step by step, from what is learned while
            serving; the lengths given here are then upper limits. Where the key is not given, it is
            so on a CPU, unless something excludes it or vLLM's own drafter serves.
        enable_adaptive_verification: vLLM's key: its manager chooses, by their confidences, which
            draft tokens of all requests the target verifies.
        untested: serve a target that was never tested below a cascade, one with recurrent layers.
    """

    num_speculative_tokens: Tokens
    levels: Annotated[list[Level], Field(min_length=1, max_length=MAX_LEVELS)]
    verifier: TargetVerifier = "block"
    horizontal_tokens: Annotated[int, Field(ge=0)] = 0
    disable_by_batch_size: Annotated[int, Field(ge=1)] | None = None
    adaptive: Annotated[bool, BeforeValidator(_read_switch)] = False
    enable_adaptive_verification: Annotated[bool, BeforeValidator(_read_switch)] = False
    untested: Annotated[bool, BeforeValidator(_read_switch)] = False

    @classmethod
    def parse(cls, raw: object) -> CascadeConfig:
        """Check the keys that a user gave next to `method: "hsd"`, as parsed from JSON.

        Raises:
            UserError: one sentence that names the key, and the file if one was read.
        """
        given = read_speculative_config(raw)
        merged, source = given, ""
        if "cascade" in given:
            path = given.pop("cascade")
            merged = {**_read_cascade(path, given), **given}
            source = f"cascade {quoted(path)}: "
        try:
            return cls.model_validate(merged)
        except ValidationError as error:
            # A misspelt key is missing too.
            faults = error.errors(include_url=False)
            fault = min(faults, key=lambda each: each["type"] != "extra_forbidden")
            if fault["loc"] and fault["loc"][0] in given:
                source = ""
            raise UserError(source + _sentence(fault)) from None

    @property
    def drawn_verifier(self) -> Verifier:
        """How drafts of requests that are not coupled are verified."""
        return "block" if self.verifier == "coupled" else self.verifier

    @property
    def draft_lengths(self) -> list[int]:
        """Draft length of each level, the last level's included."""
        return [level.num_tokens or self.num_speculative_tokens for level in self.levels]

    @property
    def branches(self) -> int:
        """Drafts of a request that the target verifies together; a level above verifies chains."""
        return getattr(self.levels[0], "branches", 1) if len(self.levels) == 1 else 1

    @property
    def scheduled_tokens(self) -> int:
        """Draft tokens of a request in vLLM's schedule: one list, with the root of each branch."""
        return self.branches * (self.num_speculative_tokens + 1) - 1

    @property
    def several_drafts(self) -> bool:
        """Whether a model draws several drafts of a request, in place of one."""
        return self.branches > 1 and self.levels[0].kind != "sources"

    @property
    def is_stock(self) -> bool:
        """Whether vLLM's own drafter serves the only level, or its last source."""
        lowest = self.levels[0]
        # It does not adapt: what can be a level on a CPU is one there.
        level = self.adaptive and lowest.last_drafts_by and platform.read_on_host()
        return len(self.levels) == 1 and lowest.drafters[-1].is_stock and not level

    @property
    def has_model_next_to_lookups(self) -> bool:
        """Whether the last source of level 0 can be a level above the others, which are lookups."""
        *lookups, last = self.levels[0].drafters
        return bool(lookups) and not last.is_lookup and bool(last.drafts_by)

    @property
    def verifying(self) -> list[bool]:
        """By level, whether it verifies the ones below it."""
        return [i > 0 and not level.only_lowest for i, level in enumerate(self.levels)]

    @property
    def scales_differ(self) -> bool:
        """Whether levels that draw from rows do so at unequal shares of the temperature."""
        each = zip(self.levels, self.options(), strict=True)
        drawn = [own.temperature_scale for level, own in each if not level.drafters[-1].is_lookup]
        return len({*drawn}) > 1

    @property
    def interleaved(self) -> list[int]:
        """Levels that verify nothing, and add a token to each draft from below."""
        own = [getattr(level, "verifier", None) for level in self.levels]
        return [i for i, verifier in enumerate(own) if verifier == "none"]

    def options(self) -> list[LevelOptions]:
        """How each level takes part in the cascade."""
        return [
            level.options(length, self.drawn_verifier)
            for level, length in zip(self.levels, self.draft_lengths, strict=True)
        ]

    @model_validator(mode="after")
    def _check_levels(self) -> Self:
        limit, last = self.num_speculative_tokens, len(self.levels) - 1
        for i, level in enumerate(self.levels):
            name = f"levels[{i}]"
            if i == last and level.num_tokens not in (None, limit):
                raise ValueError(
                    f"{name}.num_tokens is {level.num_tokens}, but the last level fills "
                    f"num_speculative_tokens ({limit}): leave it out"
                )
            if i < last and level.num_tokens is None:
                raise ValueError(
                    f"{name} needs the key 'num_tokens': how many tokens it passes to "
                    f"levels[{i + 1}] at a time"
                )
            if level.num_tokens is not None and level.num_tokens > limit:
                # Papers let the level above pass on all that it accepts, and a token of its own.
                raise ValueError(
                    f"{name}.num_tokens is {level.num_tokens}, above num_speculative_tokens "
                    f"({limit}): lower num_tokens, or raise num_speculative_tokens to "
                    f"{level.num_tokens + 1} for drafts that are accepted whole"
                )
            if i > 0 and level.only_lowest:
                raise ValueError(
                    f"{name}.{level.kind} cannot verify levels[{i - 1}], since "
                    f"{level.only_lowest}: put it first"
                )
        if self.interleaved and self.adaptive:
            raise ValueError(
                f"levels[{self.interleaved[0]}].verifier is \"none\", and 'adaptive' goes by what "
                "every level accepts: remove one of them"
            )
        if 1 in self.interleaved and self.levels[0].kind == "sources":
            raise ValueError(
                'levels[1].verifier is "none", and levels[0].sources are chosen by what the next '
                "level accepts: give one of the sources alone, or another verifier"
            )
        for key in ("verifier", "max_rounds"):
            if getattr(self.levels[0], key, None) is not None:
                raise ValueError(
                    f"levels[0].{key} has no meaning, since the first level verifies no other: "
                    "remove it"
                )
        for i, level in enumerate(self.levels):
            if last and getattr(level, "branches", 1) > 1:
                raise ValueError(
                    f"levels[{i}].branches is for a level alone, whose drafts the target verifies "
                    "together: remove it or the other levels"
                )
        if self.several_drafts and self.adaptive:
            raise ValueError(
                "levels[0].branches draws as many drafts as it says, and 'adaptive' chooses how "
                "much is drafted: remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_verification(self) -> Self:
        for key, holds in {"adaptive": self.adaptive, "branches": self.branches > 1}.items():
            if holds and self.enable_adaptive_verification:
                raise ValueError(
                    f"enable_adaptive_verification lets vLLM choose how much of one draft of each "
                    f"request is verified, which {key} chooses too: remove one of them"
                )
        return self

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        """Every level gets to draft: a level that verifies keeps one place for its own token."""
        if self.horizontal_tokens and len(self.levels) == 1:
            raise ValueError(
                "horizontal_tokens continue the top level with level 0: remove it or give "
                "two levels"
            )
        if self.horizontal_tokens >= self.num_speculative_tokens:
            raise ValueError(
                f"horizontal_tokens ({quoted(self.horizontal_tokens)}) leaves no room for the top "
                f"level in num_speculative_tokens ({self.num_speculative_tokens}): lower it"
            )
        room, key = self.num_speculative_tokens - self.horizontal_tokens, "num_speculative_tokens"
        for i in range(len(self.levels) - 1, 0, -1):
            if self.draft_lengths[i] < room:
                room, key = self.draft_lengths[i], f"levels[{i}].num_tokens"
            if room < 2:
                raise ValueError(
                    f"levels[{i}] has room for one token, its own, so that levels[{i - 1}] would "
                    f"never draft: raise {key} by {2 - room}, or remove levels[{i - 1}]"
                )
            room -= 1
        return self


def read_speculative_config(raw: object) -> dict[str, Any]:
    """The mapping given as `speculative_config` (None for nothing), with underscores in its keys.

    Raises:
        UserError: not a mapping, a key that is no printable text, or one given both ways.
    """
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise UserError(
            f'speculative_config is {quoted(raw)}: give a mapping such as {{"method": "hsd", ...}}.'
        )
    try:
        return with_underscores(raw)
    except ValueError as error:
        raise UserError(f"speculative_config {error}.") from None


def _read_cascade(path: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in a cascade file, without what the planner notes in it."""
    if "levels" in given:
        raise UserError("'cascade' and 'levels' exclude each other: give one of them.")
    if not isinstance(path, str | Path) or not str(path):
        raise UserError(
            f"cascade is {quoted(path)}: give the path of a file that `vllm-hsd plan` wrote."
        )
    plan = read_json(path, "cascade", "vllm-hsd plan", MAX_CASCADE_BYTES)
    schema = plan.get("schema") if isinstance(plan, dict) else None
    if type(schema) is not int or schema != CASCADE_SCHEMA:
        raise UserError(
            f'cascade: {quoted(path)} lacks "schema": {CASCADE_SCHEMA}; write it with this '
            "version's `vllm-hsd plan`."
        )
    try:
        plan = with_underscores(plan)
    except ValueError as error:
        raise UserError(f"cascade: {quoted(path)} {error}.") from None
    return {key: value for key, value in plan.items() if key not in ("schema", "planned_for")}


_MISSING = {
    "levels": "'levels' (a list of drafters, cheapest first) or 'cascade' (a file that "
    "`vllm-hsd plan` wrote)",
    "num_speculative_tokens": "'num_speculative_tokens' (the longest draft that the target "
    "verifies in one call)",
}


def _without_tags(location: tuple[Any, ...]) -> tuple[list[Any], str | None]:
    """A fault's place without the kinds that pydantic adds to it, and the last of these."""
    path, kind = [], None
    for i, part in enumerate(location):
        if i > 1 and location[i - 2] in ("levels", "sources") and isinstance(location[i - 1], int):
            kind = part
        else:
            path.append(part)
    return path, kind


def _sentence(fault: Any) -> str:
    """A fault of a pydantic report as one sentence: the key, what it must be, what was given."""
    path, kind = _without_tags(fault["loc"])
    if fault["type"] == "missing":
        return f"method 'hsd' needs the key {_MISSING[path[0]]}."
    if fault["type"] == "extra_forbidden":
        owner, unknown = _key(path[:-1]), quoted(path[-1])
        if not owner:
            known = ["cascade", "method", *CascadeConfig.model_fields]
            return f"method 'hsd' has no key {unknown}; its keys are {', '.join(sorted(known))}."
        named, fields = owner, _value_keys(path[-2])
        if fields is None:
            named, fields = f"{owner} of kind '{kind}'", KINDS[str(kind)]
        known = sorted(fields.model_fields)
        rest = f"its keys are {', '.join(known)}" if known else "it has none: leave it empty"
        return f"{named} has no key {unknown}; {rest}."
    if fault["type"] == "value_error":
        return f"{_key(path)} {fault['ctx']['error']}.".lstrip()
    given = f"(given: {quoted(fault['input'])})"
    if (fields := _value_keys(path[-1])) is not None:
        return f"{_key(path)}: give a mapping such as {fields.example} {given}."
    message = fault["msg"]
    return f"{_key(path)}: {message[0].lower()}{message[1:]} {given}."


def _value_keys(key: object) -> type[Keys] | None:
    """The keys of a key's value, if that is a mapping."""
    return KINDS[key].value_keys if isinstance(key, str) and key in KINDS else None


def _key(path: list[Any]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).lstrip(".")
