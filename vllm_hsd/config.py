"""What a user writes: the keys of `--speculative-config` for method "hsd"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Verifier = Annotated[
    Literal["block", "standard"],
    BeforeValidator(lambda value: "block" if value == "hierarchical" else value),
]
Name = Annotated[str, Field(min_length=1)]

LEVEL_KINDS = ("model", "early_exit", "exit_head", "ngram", "bigram")

# Per-model keys of vLLM's own draft configuration; vLLM's class parses their values.
MODEL_KEYS = (
    "attention_backend",
    "code_revision",
    "draft_load_config",
    "draft_tensor_parallel_size",
    "enforce_eager",
    "kv_cache_dtype",
    "max_model_len",
    "moe_backend",
    "quantization",
    "revision",
)


class ConfigError(ValueError):
    """A configuration that cannot be served; the message names the key and the fix."""


class NgramConfig(BaseModel):
    """Prompt lookup: the continuation of the longest match of the last min..max tokens."""

    model_config = ConfigDict(extra="forbid")

    max: Annotated[int, Field(ge=1)] = 4
    min: Annotated[int, Field(ge=1)] = 1


class LevelConfig(BaseModel):
    """One drafter of a cascade (a level); keys as written in the JSON.

    Its kind is the one key set of `model` (path or name), `early_exit` (layers of the target),
    `exit_head` (directory written by `vllm-hsd train-heads`), `ngram` and `bigram` (file written
    by `vllm-hsd bigram`).

    `num_tokens` is the level's budget: how many tokens it hands up per request of the level
    above it. The last level has none of its own, it fills `num_speculative_tokens`.
    """

    model_config = ConfigDict(extra="forbid")

    model: Name | None = None
    early_exit: Annotated[int, Field(ge=1)] | None = None
    exit_head: Name | None = None
    ngram: NgramConfig | None = None
    bigram: Name | None = None
    num_tokens: Annotated[int, Field(ge=1)] | None = None
    max_rounds: Annotated[int, Field(ge=1)] | None = None
    verifier: Verifier | None = None
    stopping: Literal["fixed", "entropy"] = "fixed"
    temperature_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    model_keys: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @property
    def kind(self) -> str:
        """The one key of `LEVEL_KINDS` that is set."""
        return next(kind for kind in LEVEL_KINDS if getattr(self, kind) is not None)


class CascadeConfig(BaseModel):
    """A cascade: levels cheapest first, the target's verifier, and the longest draft.

    Build it with `CascadeConfig.parse`, which turns every fault into one `ConfigError` sentence.
    """

    model_config = ConfigDict(extra="forbid")

    num_speculative_tokens: Annotated[int, Field(ge=1, le=128)]
    levels: list[LevelConfig]
    verifier: Verifier = "block"
    horizontal_tokens: Annotated[int, Field(ge=0)] = 0

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> CascadeConfig:
        """Check the keys that a user gave beside `method: "hsd"`.

        Args:
            raw: the mapping as parsed from JSON, dashes or underscores in its keys.

        Raises:
            ConfigError: one sentence that names the key at fault and what to do.
        """
        raw = _underscored(raw)
        if "cascade" in raw:
            raw = _read_cascade(raw)
        if "levels" not in raw:
            raise ConfigError(
                "method 'hsd' needs the key 'levels' (a list of drafters, cheapest first) "
                "or 'cascade' (a file written by `vllm-hsd plan`)."
            )
        if raw.get("num_speculative_tokens") is None:
            raise ConfigError(
                "method 'hsd' needs the key 'num_speculative_tokens': the longest draft that "
                "the target verifies in one call."
            )
        if not isinstance(raw["levels"], list) or not raw["levels"]:
            raise ConfigError("'levels' must be a list of at least one level.")
        _refuse_switches(raw)
        levels = [_split_level(i, level) for i, level in enumerate(raw["levels"])]
        try:
            parsed = cls(**{**raw, "levels": levels})
        except ValidationError as error:
            raise ConfigError(_one_sentence(error)) from None
        parsed._check_draft_lengths()
        parsed._check_lookup()
        parsed._check_tail()
        parsed._check_room()
        return parsed

    def _check_draft_lengths(self) -> None:
        limit = self.num_speculative_tokens
        for i, level in enumerate(self.levels):
            last = i == len(self.levels) - 1
            if last and level.num_tokens not in (None, limit):
                raise ConfigError(
                    f"levels[{i}].num_tokens is {level.num_tokens}, but the last level fills "
                    f"num_speculative_tokens ({limit}): leave it out."
                )
            if not last and level.num_tokens is None:
                raise ConfigError(
                    f"levels[{i}] needs the key 'num_tokens': how many tokens it hands to "
                    f"levels[{i + 1}] at a time."
                )
            if level.num_tokens is not None and level.num_tokens > limit:
                raise ConfigError(
                    f"levels[{i}].num_tokens is {level.num_tokens}, above "
                    f"num_speculative_tokens ({limit}): lower the one or raise the other."
                )
            if i == 0 and (level.verifier is not None or level.max_rounds is not None):
                key = "verifier" if level.verifier is not None else "max_rounds"
                raise ConfigError(
                    f"levels[0].{key} has no meaning, since the first level verifies nobody: "
                    f"remove it."
                )

    def _check_lookup(self) -> None:
        for i, level in enumerate(self.levels):
            if level.kind != "ngram":
                continue
            if i > 0:
                raise ConfigError(
                    f"levels[{i}].ngram cannot verify levels[{i - 1}]: an n-gram level has no rows "
                    "of its own, put it first."
                )
            if level.ngram.min > level.ngram.max:
                raise ConfigError(
                    f"levels[{i}].ngram.min ({level.ngram.min}) is above max "
                    f"({level.ngram.max}): lower the one or raise the other."
                )
            for key, plain in (("stopping", "fixed"), ("temperature_scale", 1.0)):
                if getattr(level, key) != plain:
                    raise ConfigError(
                        f"levels[{i}].{key} has no meaning for kind 'ngram', whose rows are "
                        "one-hot: remove it."
                    )

    def _check_tail(self) -> None:
        if self.horizontal_tokens and len(self.levels) == 1:
            raise ConfigError(
                "horizontal_tokens continue the top level with level 0: remove it or give two levels."
            )
        if self.horizontal_tokens >= self.num_speculative_tokens:
            raise ConfigError(
                f"horizontal_tokens ({self.horizontal_tokens}) leaves no room for the top level in num_speculative_tokens "
                f"({self.num_speculative_tokens}): lower it."
            )

    def _check_room(self) -> None:
        """Every level gets to draft: a level that verifies keeps one place for its own token."""
        room, key = self.num_speculative_tokens - self.horizontal_tokens, "num_speculative_tokens"
        for i in range(len(self.levels) - 1, 0, -1):
            if self.draft_lengths[i] < room:
                room, key = self.draft_lengths[i], f"levels[{i}].num_tokens"
            if room < 2:
                raise ConfigError(
                    f"levels[{i}] has room for one token, its own, so that levels[{i - 1}] would "
                    f"never draft: raise {key} or remove levels[{i - 1}]."
                )
            room -= 1

    @property
    def draft_lengths(self) -> list[int]:
        """Tokens that each level hands up per call, the last level's included."""
        return [level.num_tokens or self.num_speculative_tokens for level in self.levels]


def _underscored(raw: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): value for key, value in raw.items()}


def _read_cascade(raw: dict[str, Any]) -> dict[str, Any]:
    """Merge the file named by `cascade` under the keys given beside it."""
    if "levels" in raw:
        raise ConfigError("'cascade' and 'levels' exclude each other: give one of them.")
    if not isinstance(raw["cascade"], str):
        raise ConfigError("cascade: give the path of a file that `vllm-hsd plan` wrote.")
    path = Path(raw["cascade"])
    if not path.is_file():
        raise ConfigError(f"cascade: no file '{path}'; `vllm-hsd plan` writes one.")
    try:
        plan = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"cascade: '{path}' is not JSON ({error}).") from None
    if not isinstance(plan, dict) or plan.get("schema") != 1:
        raise ConfigError(
            f"cascade: '{path}' lacks \"schema\": 1; write it with this version's vllm-hsd plan."
        )
    kept = ("num_speculative_tokens", "levels", "verifier", "horizontal_tokens")
    given = {key: value for key, value in raw.items() if key != "cascade"}
    return {**{key: plan[key] for key in kept if key in plan}, **given}


def _refuse_switches(raw: dict[str, Any], prefix: str = "") -> None:
    """No key of ours is true or false, which pydantic would read as 1 or 0."""
    for key, value in raw.items():
        if isinstance(value, bool):
            raise ConfigError(
                f"{prefix}{key} is {json.dumps(value)}, but it is no switch: give its value, or "
                "leave the key out."
            )


def _split_level(index: int, raw: Any) -> dict[str, Any]:
    """Set vLLM's own per-model keys of one level apart and check its kind."""
    name = f"levels[{index}]"
    if not isinstance(raw, dict):
        raise ConfigError(f'{name} must be a mapping such as {{"model": PATH}}.')
    raw = _underscored(raw)
    kinds = [kind for kind in LEVEL_KINDS if raw.get(kind) is not None]
    if len(kinds) > 1:
        raise ConfigError(f"{name} has two kinds, '{kinds[0]}' and '{kinds[1]}': keep one.")
    own = set(LevelConfig.model_fields) - {"model_keys"}
    unknown = [key for key in raw if key not in own and key not in MODEL_KEYS]
    if unknown:
        known = ", ".join(sorted(own | set(MODEL_KEYS)))
        raise ConfigError(f"{name} has an unknown key '{unknown[0]}'; known keys: {known}.")
    if not kinds:
        raise ConfigError(f"{name} needs one of the kinds: {', '.join(LEVEL_KINDS)}.")
    model_keys = {key: raw.pop(key) for key in MODEL_KEYS if key in raw}
    _refuse_switches(raw, f"{name}.")
    if model_keys and kinds[0] != "model":
        raise ConfigError(
            f"{name}.{next(iter(model_keys))} is a key of kind 'model'; this level is of kind "
            f"'{kinds[0]}': remove it."
        )
    return {**raw, "model_keys": model_keys}


def _one_sentence(error: ValidationError) -> str:
    """The first fault of a pydantic report: its key, what it wants and what was given."""
    fault = error.errors()[0]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"])
    key = key.lstrip(".")
    if fault["type"] == "extra_forbidden":
        fields = {"cascade", "method", *CascadeConfig.model_fields}
        if "ngram" in fault["loc"]:
            fields = set(NgramConfig.model_fields)
        known = ", ".join(sorted(fields))
        return f"unknown key '{key}' for method 'hsd'; known keys: {known}."
    if fault["type"] == "model_type" and "ngram" in fault["loc"]:
        return f'{key}: give a mapping such as {{"max": 4}} (given: {fault["input"]!r}).'
    return f"{key}: {fault['msg'].lower()} (given: {fault['input']!r})."
