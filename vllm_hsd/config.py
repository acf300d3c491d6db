"""User-facing configuration: the keys of `--speculative-config` for method "hsd"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from vllm_hsd.checked_files import read_json
from vllm_hsd.errors import UserError, quoted

# "hierarchical" is the papers' name of block verification.
Verifier = Annotated[
    Literal["block", "standard"],
    BeforeValidator(lambda value: "block" if value == "hierarchical" else value),
]
Stopping = Literal["fixed", "entropy"]
Name = Annotated[str, Field(min_length=1)]
Tokens = Annotated[int, Field(ge=1, le=128)]
Probability = Annotated[float, Field(ge=0, le=1)]
VllmKey = Annotated[Any, Field(exclude=True)]

MAX_LEVELS = 16
MAX_SOURCES = 8
# 300 bytes each: 5 GiB.
MAX_SHARED_TOKENS = 1 << 24
MAX_CASCADE_BYTES = 1 << 20
CASCADE_SCHEMA = 1


class _Keys(BaseModel):
    """Strict: an unknown key is an error, and true is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NgramConfig(_Keys):
    """Prompt lookup.

    Attributes:
        max: longest n-gram at the end of the text that is looked up, in tokens.
        min: shortest.
    """

    max: Annotated[int, Field(ge=1, le=1024)] = 4
    min: Annotated[int, Field(ge=1, le=1024)] = 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"has min {self.min} above max {self.max}: lower min or raise max")
        return self


class SuffixConfig(_Keys):
    """Suffix-tree lookup.

    Attributes:
        store: file of texts to look in, which `vllm-hsd build suffix` wrote.
        shared_tokens: most tokens of the server's earlier outputs to look in, whoever asked for
            them; 0 for none.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
    """

    store: Name | None = None
    shared_tokens: Annotated[int, Field(ge=0, le=MAX_SHARED_TOKENS)] = 0
    min_acceptance: Probability = 0.05


class _LevelKeys(_Keys):
    """Keys of every level.

    Attributes:
        kind: the key that says what drafts, and the attribute that holds its value.
        num_tokens: draft length, the tokens that the level passes to the level above it at a time;
            None for the last level, which fills `num_speculative_tokens`.
    """

    kind: ClassVar[str]

    num_tokens: Tokens | None = None


class _SamplingLevelKeys(_LevelKeys):
    """Keys of levels that have probabilities.

    Attributes:
        stopping: fixed draft lengths, or entropy-based early stopping (experimental).
        temperature_scale: factor on the request's temperature (experimental).
    """

    stopping: Stopping = "fixed"
    temperature_scale: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] = 1.0


class _VerifyingLevelKeys(_SamplingLevelKeys):
    """Keys of levels that have probabilities for any token, and so can verify the level below.

    Attributes:
        verifier: how the level verifies the level below; None for the cascade's verifier.
        max_rounds: verification rounds per draft; None for as many as it takes.
    """

    verifier: Verifier | None = None
    max_rounds: Tokens | None = None


class _VllmModelKeys(_LevelKeys):
    """Keys of levels that vLLM loads as a model: those of its own draft configuration.

    Attributes:
        max_model_len: longest context that the level drafts for, in tokens.
    """

    attention_backend: VllmKey = None
    code_revision: VllmKey = None
    draft_load_config: VllmKey = None
    draft_tensor_parallel_size: VllmKey = None
    enforce_eager: VllmKey = None
    kv_cache_dtype: VllmKey = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    moe_backend: VllmKey = None
    quantization: VllmKey = None
    revision: VllmKey = None

    @property
    def path(self) -> str:
        """Path or name of the model."""
        return getattr(self, self.kind)

    @property
    def model_keys(self) -> dict[str, Any]:
        """The keys of vLLM that were given; vLLM's class parses their values."""
        keys = _VllmModelKeys.model_fields.keys() - _LevelKeys.model_fields.keys()
        return {key: getattr(self, key) for key in sorted(self.model_fields_set & keys)}


class ModelLevelConfig(_VerifyingLevelKeys, _VllmModelKeys):
    """A draft model.

    Attributes:
        model: path or name.
    """

    kind = "model"

    model: Name


class Eagle3LevelConfig(_SamplingLevelKeys, _VllmModelKeys):
    """An EAGLE-3 head of the target, which reads the target's states of verified tokens.

    It takes one unverified token at a time, so it cannot verify a draft: only the lowest level.

    Attributes:
        eagle3: path or name of the head.
    """

    kind = "eagle3"
    verifier: ClassVar[None] = None
    max_rounds: ClassVar[None] = None

    eagle3: Name


class EarlyExitLevelConfig(_VerifyingLevelKeys):
    """The target's first layers with its own norm and head.

    Attributes:
        early_exit: how many layers run.
    """

    kind = "early_exit"

    early_exit: Annotated[int, Field(ge=1, le=10_000)]


class ExitHeadLevelConfig(_VerifyingLevelKeys):
    """The target's first layers with a trained head.

    Attributes:
        exit_head: directory that `vllm-hsd build exit-heads` wrote.
    """

    kind = "exit_head"

    exit_head: Name


class _LookupLevelKeys(_LevelKeys):
    """A lookup; its drafts are point masses, so it verifies nothing and samples nothing."""

    verifier: ClassVar[None] = None
    max_rounds: ClassVar[None] = None
    stopping: ClassVar[Stopping] = "fixed"
    temperature_scale: ClassVar[float] = 1.0


class NgramLevelConfig(_LookupLevelKeys):
    """Prompt lookup."""

    kind = "ngram"

    ngram: NgramConfig


class SuffixLevelConfig(_LookupLevelKeys):
    """Lookup in suffix trees of the request's text and of others."""

    kind = "suffix"

    suffix: SuffixConfig


class BigramLevelConfig(_VerifyingLevelKeys):
    """A table of token pairs.

    Attributes:
        bigram: file that `vllm-hsd build bigram` wrote.
    """

    kind = "bigram"

    bigram: Name


SourceConfig = (
    ModelLevelConfig
    | EarlyExitLevelConfig
    | ExitHeadLevelConfig
    | NgramLevelConfig
    | SuffixLevelConfig
    | BigramLevelConfig
    | Eagle3LevelConfig
)


def _read_level(raw: object) -> object:
    """A level with underscores in its keys and exactly one kind."""
    return _with_one_kind(raw, LEVEL_KINDS)


def _read_source(raw: object) -> object:
    return _with_one_kind(raw, SOURCE_KINDS)


def _with_one_kind(raw: object, known: tuple[str, ...]) -> object:
    if isinstance(raw, _LevelKeys):
        return raw
    if not isinstance(raw, Mapping):
        raise ValueError(f'must be a mapping such as {{"model": PATH}} (given: {quoted(raw)})')
    level = _with_underscores(raw)
    kinds = [kind for kind in known if kind in level]
    if not kinds:
        raise ValueError(f"needs one of the kinds: {', '.join(known)}")
    if len(kinds) > 1:
        raise ValueError(f"has two kinds, '{kinds[0]}' and '{kinds[1]}': keep one")
    return level


def _kind(level: Any) -> str:
    if isinstance(level, _LevelKeys):
        return level.kind
    return next(kind for kind in LEVEL_KINDS if kind in level)


_Sources = (
    Annotated[ModelLevelConfig, Tag("model")]
    | Annotated[EarlyExitLevelConfig, Tag("early_exit")]
    | Annotated[ExitHeadLevelConfig, Tag("exit_head")]
    | Annotated[NgramLevelConfig, Tag("ngram")]
    | Annotated[SuffixLevelConfig, Tag("suffix")]
    | Annotated[BigramLevelConfig, Tag("bigram")]
    | Annotated[Eagle3LevelConfig, Tag("eagle3")]
)
Source = Annotated[_Sources, Discriminator(_kind), BeforeValidator(_read_source)]


class FirstOfLevelConfig(_LevelKeys):
    """Several sources, of which the most promising one drafts: lookups, then at most one other.

    Attributes:
        first_of: the sources.
        min_acceptance: a lookup's draft ends before the token that is less likely to be accepted.
    """

    kind = "first_of"
    verifier: ClassVar[None] = None
    max_rounds: ClassVar[None] = None

    first_of: Annotated[list[Source], Field(min_length=1, max_length=MAX_SOURCES)]
    min_acceptance: Probability = 0.05

    @property
    def stopping(self) -> Stopping:
        """The last source's; lookups have none."""
        return self.first_of[-1].stopping

    @property
    def temperature_scale(self) -> float:
        """The last source's."""
        return self.first_of[-1].temperature_scale

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        for i, source in enumerate(self.first_of):
            if i < len(self.first_of) - 1 and not isinstance(source, _LookupLevelKeys):
                raise ValueError(
                    f"has first_of[{i}] of kind '{source.kind}' before others: lookups (ngram, "
                    "suffix) come first, and one source of another kind may be the last"
                )
            for key in ("num_tokens", "verifier", "max_rounds"):
                if getattr(source, key) is not None:
                    raise ValueError(
                        f"has first_of[{i}].{key}, which a source does not take: remove it"
                        + (" or give it to the level" if key == "num_tokens" else "")
                    )
        return self


LevelConfig = SourceConfig | FirstOfLevelConfig
LEVEL_CLASSES: dict[str, type[_LevelKeys]] = {cls.kind: cls for cls in get_args(LevelConfig)}
LEVEL_KINDS = tuple(LEVEL_CLASSES)
SOURCE_KINDS = tuple(cls.kind for cls in get_args(SourceConfig))
# kind -> why such a level verifies no other
_ONLY_LOWEST = {
    "ngram": "a lookup has no probabilities",
    "suffix": "a lookup has no probabilities",
    "eagle3": "an EAGLE-3 head takes unverified tokens one by one",
    "first_of": "its sources only draft",
}

Level = Annotated[
    _Sources | Annotated[FirstOfLevelConfig, Tag("first_of")],
    Discriminator(_kind),
    BeforeValidator(_read_level),
]


def sources(level: LevelConfig) -> list[SourceConfig]:
    """The sources of a level: itself, unless it has several."""
    return level.first_of if isinstance(level, FirstOfLevelConfig) else [level]


def source_names(level: FirstOfLevelConfig) -> list[str]:
    """A name for each source: its kind, numbered where a kind is there twice."""
    kinds = [source.kind for source in level.first_of]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: i + 1].count(kind)}"
        for i, kind in enumerate(kinds)
    ]


class CascadeConfig(_Keys):
    """A cascade; build it with `CascadeConfig.parse`.

    Attributes:
        num_speculative_tokens: longest draft that the target verifies in one call.
        levels: drafters, cheapest first.
        verifier: how the target verifies, and every level that does not say otherwise.
        horizontal_tokens: unverified tokens of level 0 after the top level's draft, a horizontal
            cascade (experimental).
        adaptive: select the levels and draft lengths step by step, from what is learned while
            serving; the lengths given here are then upper limits (experimental).
    """

    num_speculative_tokens: Tokens
    levels: Annotated[list[Level], Field(min_length=1, max_length=MAX_LEVELS)]
    verifier: Verifier = "block"
    horizontal_tokens: Annotated[int, Field(ge=0)] = 0
    adaptive: bool = False

    @classmethod
    def parse(cls, raw: object) -> CascadeConfig:
        """Check the keys that a user gave next to `method: "hsd"`.

        Args:
            raw: the mapping as parsed from JSON, dashes or underscores in its keys.

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
            fault = error.errors(include_url=False)[0]
            if fault["loc"] and fault["loc"][0] in given:
                source = ""
            raise UserError(source + _sentence(fault)) from None

    @property
    def draft_lengths(self) -> list[int]:
        """Draft length of each level, the last level's included."""
        return [level.num_tokens or self.num_speculative_tokens for level in self.levels]

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
                raise ValueError(
                    f"{name}.num_tokens is {level.num_tokens}, above num_speculative_tokens "
                    f"({limit}): lower num_tokens or raise num_speculative_tokens"
                )
            if i > 0 and level.kind in _ONLY_LOWEST:
                raise ValueError(
                    f"{name}.{level.kind} cannot verify levels[{i - 1}], since "
                    f"{_ONLY_LOWEST[level.kind]}: put it first"
                )
            if self.adaptive and any(source.kind == "eagle3" for source in sources(level)):
                raise ValueError(
                    f"{name} has an EAGLE-3 head, which must read every step of the target, and "
                    "'adaptive' lets levels rest: remove one of them"
                )
        for key in ("verifier", "max_rounds"):
            if getattr(self.levels[0], key) is not None:
                raise ValueError(
                    f"levels[0].{key} has no meaning, since the first level verifies no other: "
                    "remove it"
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
                    f"never draft: raise {key} or remove levels[{i - 1}]"
                )
            room -= 1
        return self


def read_speculative_config(raw: object) -> dict[str, Any]:
    """The mapping given as `speculative_config`, with underscores in its keys.

    Args:
        raw: what a user gave, None for nothing.

    Raises:
        UserError: not a mapping, a key that is not text, or a key given with a dash and with an
            underscore.
    """
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise UserError(
            f'speculative_config is {quoted(raw)}: give a mapping such as {{"method": "hsd", ...}}.'
        )
    try:
        return _with_underscores(raw)
    except ValueError as error:
        raise UserError(f"speculative_config {error}.") from None


def _with_underscores(raw: Mapping[Any, Any]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in raw.items():
        if not isinstance(key, str):
            raise ValueError(f"has the key {quoted(key)}: keys must be text")
        name = key.replace("-", "_")
        if name in mapping:
            raise ValueError(
                f"has the key {quoted(name)} twice, with a dash and with an underscore: keep one"
            )
        mapping[name] = value
    return mapping


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
        plan = _with_underscores(plan)
    except ValueError as error:
        raise UserError(f"cascade: {quoted(path)} {error}.") from None
    return {key: plan[key] for key in CascadeConfig.model_fields if key in plan}


_MISSING = {
    "levels": "'levels' (a list of drafters, cheapest first) or 'cascade' (a file that "
    "`vllm-hsd plan` wrote)",
    "num_speculative_tokens": "'num_speculative_tokens' (the longest draft that the target "
    "verifies in one call)",
}


# Kinds whose value is a mapping.
_VALUES: dict[str, type[_Keys]] = {"ngram": NgramConfig, "suffix": SuffixConfig}


def _without_tags(location: tuple[Any, ...]) -> tuple[list[Any], str | None]:
    """A fault's place without the kinds that pydantic adds to it, and the last of these."""
    path, kind = [], None
    for i, part in enumerate(location):
        if i > 1 and location[i - 2] in ("levels", "first_of") and isinstance(location[i - 1], int):
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
        if kind is None:
            known = ["cascade", "method", *CascadeConfig.model_fields]
            return f"method 'hsd' has no key {unknown}; its keys are {', '.join(sorted(known))}."
        fields = _VALUES.get(str(path[-2]), LEVEL_CLASSES[kind])
        known = sorted(fields.model_fields)
        return f"{owner} of kind '{kind}' has no key {unknown}; its keys are {', '.join(known)}."
    if fault["type"] == "value_error":
        return f"{_key(path)} {fault['ctx']['error']}.".lstrip()
    given = f"(given: {quoted(fault['input'])})"
    if path[-1] in _VALUES:
        example = '{"max": 4}' if path[-1] == "ngram" else '{"store": "chats.npz"}'
        return f"{_key(path)}: give a mapping such as {example} {given}."
    message = fault["msg"]
    return f"{_key(path)}: {message[0].lower()}{message[1:]} {given}."


def _key(path: list[Any]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(parts).lstrip(".")
