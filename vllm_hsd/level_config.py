"""The keys of a level in `--speculative-config` for method "hsd": a class per kind of level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from vllm_hsd.errors import quoted

# "hierarchical" is the papers' name of block verification.
_ALIAS = BeforeValidator(lambda value: "block" if value == "hierarchical" else value)
Verifier = Annotated[Literal["block", "standard"], _ALIAS]
TargetVerifier = Annotated[Literal["block", "standard", "coupled"], _ALIAS]
Stopping = Literal["fixed", "entropy"]
Name = Annotated[str, Field(min_length=1)]
Tokens = Annotated[int, Field(ge=1, le=128)]
Probability = Annotated[float, Field(ge=0, le=1)]
VllmKey = Annotated[Any, Field(exclude=True)]

MAX_SOURCES = 8
# 300 bytes each: 5 GiB.
MAX_SHARED_TOKENS = 1 << 24


class Keys(BaseModel):
    """Keys that a user gives. Strict: an unknown key is an error, and true is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class NgramConfig(Keys):
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


class SuffixConfig(Keys):
    """Suffix-tree lookup.

    Attributes:
        store: file of texts to look in, which `vllm-hsd build suffix` wrote.
        shared_tokens: most tokens of the server's earlier outputs, to any client, to look in; 0 for
            none.
        min_acceptance: a draft ends before the token that is less likely to be accepted.
    """

    store: Name | None = None
    shared_tokens: Annotated[int, Field(ge=0, le=MAX_SHARED_TOKENS)] = 0
    min_acceptance: Probability = 0.05


class _LevelKeys(Keys):
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


class NgramModelLevelConfig(_VerifyingLevelKeys):
    """An n-gram language model of a store of texts and of the request's own text.

    Attributes:
        ngram_model: store that `vllm-hsd build suffix` wrote.
    """

    kind = "ngram_model"

    ngram_model: Name


SourceConfig = (
    ModelLevelConfig
    | EarlyExitLevelConfig
    | ExitHeadLevelConfig
    | NgramLevelConfig
    | SuffixLevelConfig
    | BigramLevelConfig
    | NgramModelLevelConfig
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
    level = with_underscores(raw)
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
    | Annotated[NgramModelLevelConfig, Tag("ngram_model")]
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

Level = Annotated[
    _Sources | Annotated[FirstOfLevelConfig, Tag("first_of")],
    Discriminator(_kind),
    BeforeValidator(_read_level),
]


def sources(level: LevelConfig) -> list[SourceConfig]:
    """The sources of a level: itself, unless it has several."""
    return level.first_of if isinstance(level, FirstOfLevelConfig) else [level]


def reads_late(level: LevelConfig) -> bool:
    """Whether a model reads a text no sooner than it drafts for it, as the last of the sources.

    EAGLE-3 heads read every step of the target.
    """
    return isinstance(level, FirstOfLevelConfig) and level.first_of[-1].kind == "model"


def source_names(level: FirstOfLevelConfig) -> list[str]:
    """A name for each source: its kind, numbered where a kind is there twice."""
    kinds = [source.kind for source in level.first_of]
    return [
        kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: i + 1].count(kind)}"
        for i, kind in enumerate(kinds)
    ]


def with_underscores(raw: Mapping[Any, Any]) -> dict[str, Any]:
    """The mapping with underscores for the dashes in its keys.

    Raises:
        ValueError: a key that is not text, or one given both ways.
    """
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
