"""What all kinds of levels have in common: keys and defaults.

Importing this package imports neither vLLM nor torch: what needs them imports them when called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.text_store import read_store, store_vocab_size
from vllm_hsd.errors import UserError, quoted

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

# "hierarchical" is the papers' name of block verification.
_ALIAS = BeforeValidator(lambda value: "block" if value == "hierarchical" else value)
Verifier = Annotated[Literal["block", "standard"], _ALIAS]
LevelVerifier = Annotated[Literal["block", "standard", "none"], _ALIAS]
TargetVerifier = Annotated[Literal["block", "standard", "coupled"], _ALIAS]
Stopping = Literal["fixed", "entropy"]
Name = Annotated[str, Field(min_length=1)]
# That the verification kernel takes.
LONGEST_DRAFT = 63
Tokens = Annotated[int, Field(ge=1, le=LONGEST_DRAFT)]
MAX_BRANCHES = 16
Probability = Annotated[float, Field(ge=0, le=1)]
VllmKey = Annotated[Any, Field(exclude=True)]


class Keys(BaseModel):
    """Keys that a user gives. Strict: an unknown key is an error, and true is not 1.

    Attributes:
        example: of a value that is such a mapping, for messages.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    example: ClassVar[str] = "{}"


@dataclass(frozen=True)
class Target:
    """The target that a level is checked against.

    Attributes:
        model_config: vLLM's configuration of the target.
        parallel_config: vLLM's configuration of the target.
    """

    model_config: ModelConfig
    parallel_config: ParallelConfig


# kind -> its class, in the order in which messages list the kinds
KINDS: dict[str, type[LevelConfig]] = {}


class LevelConfig(Keys):
    """A level: one subclass for each kind.

    Attributes:
        kind: the key that says what drafts, and the attribute that holds its value.
        value_keys: keys of that value where it is a mapping.
        is_source: a level of several sources may have it.
        is_lookup: it finds its drafts in texts; they are point masses, so it verifies no other.
        only_lowest: why it verifies no other level; empty if it does.
        runs_target: it runs layers of the target, for other rows than the target does.
        keeps_cache: it is a model with a KV cache of its own.
        reads_target_states: it reads the target's hidden states of every step.
        reads_texts: it reads the requests' texts, which vLLM then keeps in the GPU's memory.
        drafts_by: how it drafts in a cascade, "counts" for rows without forward passes; empty if it
            drafts alone.
        is_stock: vLLM's own drafter may serve it as the only level, with our verifier; see
            `stock_keys` and `CascadeConfig.is_stock`.
        num_tokens: draft length, the tokens that the level passes to the level above it at a time;
            None for the last level, which fills `num_speculative_tokens`.
    """

    kind: ClassVar[str]
    value_keys: ClassVar[type[Keys] | None] = None
    is_source: ClassVar[bool] = True
    is_lookup: ClassVar[bool] = False
    only_lowest: ClassVar[str] = ""
    runs_target: ClassVar[bool] = False
    keeps_cache: ClassVar[bool] = False
    reads_target_states: ClassVar[bool] = False
    reads_texts: ClassVar[bool] = False
    drafts_by: ClassVar[Literal["", "lookup", "counts", "model"]] = ""
    is_stock: ClassVar[bool] = False

    num_tokens: Tokens | None = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    @property
    def drafters(self) -> list[LevelConfig]:
        """What may draft at this level: itself, unless it has several sources."""
        return [self]

    @property
    def fills_cache_lazily(self) -> bool:
        """True if the level's model fills its KV cache only when it is chosen to draft."""
        return False

    @property
    def target_layers(self) -> int | None:
        """Layers of the target that the level runs; None for a level that runs none."""
        return None

    @property
    def last_drafts_by(self) -> str:
        """`drafts_by` of its last source, which alone may have rows."""
        return self.drafts_by

    @property
    def stock_keys(self) -> dict[str, Any]:
        """vLLM's own speculative configuration of the level, where it `is_stock`."""
        raise NotImplementedError

    @property
    def description(self) -> object:
        """The level's value, for a server's log."""
        return getattr(self, self.kind)

    @classmethod
    def short_name(cls, value: object) -> str:
        """Names a level in tables of results; `value` is the user's, which may be invalid."""
        return cls.kind

    def named_sources(self, name: str) -> list[tuple[str, LevelConfig]]:
        """The sources with what messages call them, where the level is called `name`."""
        return [(name, self)]

    def options(self, draft_length: int, verifier: str) -> LevelOptions:
        """How the level takes part in a cascade.

        Args:
            draft_length: most tokens that it passes to the level above at a time.
            verifier: the cascade's, for a level that has none of its own.
        """
        return LevelOptions(draft_length, verifier)

    def check(self, name: str, target: Target, draft_length: int) -> SpeculativeConfig | None:
        """Check the level against the target, before any weights are loaded.

        Args:
            name: what messages call it, "levels[i]".
            target: the target.
            draft_length: tokens that it drafts at a time.

        Returns:
            vLLM's configuration of the model that the level loads; None if it loads none.

        Raises:
            UserError: names the level, its key and its file.
        """
        return None

    def build(self, speculator: Any, index: int) -> Any:
        """The level, not yet loaded: see `cascade.program`.

        Args:
            speculator: the cascade that it belongs to. A lookup and "counts" are built before vLLM
                measures memory; a lookup is given the texts, see `host.base_speculator`.
            index: position in the cascade, 0 the cheapest.
        """
        raise NotImplementedError


class SamplingKeys(LevelConfig):
    """Keys of levels that have probabilities.

    Attributes:
        stopping: fixed draft lengths, or entropy-based early stopping (experimental).
        temperature_scale: factor on the request's temperature (experimental).
    """

    stopping: Stopping = "fixed"
    temperature_scale: Annotated[float, Field(ge=0.1, le=100, allow_inf_nan=False)] = 1.0

    def options(self, draft_length: int, verifier: str) -> LevelOptions:
        return LevelOptions(
            draft_length,
            verifier,
            stopping=self.stopping,
            temperature_scale=self.temperature_scale,
        )


class VerifyingKeys(SamplingKeys):
    """Keys of levels that have probabilities for any token, and so can verify the level below.

    Attributes:
        verifier: how the level verifies the level below; None for the cascade's verifier. With
            "none" it adds a token of its own to each draft from below, which the next level or the
            target verifies: an interleaved cascade (experimental).
        max_rounds: verification rounds per draft; None for as many as it takes.
    """

    verifier: LevelVerifier | None = None
    max_rounds: Tokens | None = None

    def options(self, draft_length: int, verifier: str) -> LevelOptions:
        options = super().options(draft_length, self.verifier or verifier)
        options.max_rounds = self.max_rounds
        return options


class VllmModelKeys(LevelConfig):
    """Keys of levels that vLLM loads as a model: those of its own draft configuration.

    Attributes:
        max_model_len: longest context, in tokens; not where vLLM's own drafter serves the level.
    """

    keeps_cache = True

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
    def model_keys(self) -> dict[str, Any]:
        """The keys of vLLM that were given; vLLM's class parses their values."""
        keys = VllmModelKeys.model_fields.keys() - LevelConfig.model_fields.keys()
        return {key: getattr(self, key) for key in sorted(self.model_fields_set & keys)}


class BranchKeys(LevelConfig):
    """Keys of levels of which the target can verify several drafts of a request in one pass.

    Attributes:
        branches: drafts that the target verifies together, at most; 1 for a chain.
    """

    branches: Annotated[int, Field(ge=1, le=MAX_BRANCHES)] = 1


class LookupKeys(LevelConfig):
    """Keys of lookups, whose drafts are point masses."""

    is_lookup = True
    reads_texts = True
    only_lowest = "a lookup has no probabilities"

    def estimates(self, device: Any) -> Any:
        """Its `budget.source_choice.Estimates`; None for a lookup that gives its own."""
        return None


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Put the level in front of messages that begin with its key."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}.{error}") from error


def check_store(name: str, key: str, path: str, target: Target, shortest: int = 1) -> None:
    """Check a store of texts.

    Args:
        name: what messages call the level.
        key: the user's name of the store.
        path: the store.
        target: the target.
        shortest: some text must have this many tokens.

    Raises:
        UserError: it cannot be read, was built for another vocabulary, or has no such text.
    """
    with named(name):
        size, vocabulary = store_vocab_size(path, key), target.model_config.get_vocab_size()
        if size != vocabulary:
            raise UserError(
                f"{key}: {quoted(path)} was built for {size} tokens and the target has "
                f"{vocabulary}: build it with the target's tokenizer."
            )
        if max(map(len, read_store(path, key))) < shortest:
            raise UserError(
                f"{key}: {quoted(path)} has no text of two tokens: build it from longer texts."
            )
