"""A level of any kind, which is found by its key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from vllm_hsd.errors import quoted
from vllm_hsd.levels.base import KINDS, LevelConfig


@dataclass(frozen=True)
class AnyKind:
    """Annotates a level that may be of any kind, and says so where its keys name none.

    Attributes:
        sources_only: of any kind that a level of several sources may have.
    """

    sources_only: bool = False

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        known = {kind: cls for kind, cls in KINDS.items() if cls.is_source or not self.sources_only}
        union = core_schema.tagged_union_schema(
            {kind: handler.generate_schema(cls) for kind, cls in known.items()},
            discriminator=_kind,
        )
        read = partial(_with_one_kind, known=list(known))
        return core_schema.no_info_before_validator_function(read, union)


Level = Annotated[LevelConfig, AnyKind()]
Source = Annotated[LevelConfig, AnyKind(sources_only=True)]


def _with_one_kind(raw: object, known: list[str]) -> object:
    """A level with underscores in its keys and exactly one known kind, which is its first key."""
    if isinstance(raw, LevelConfig):
        return raw
    if not isinstance(raw, Mapping):
        raise ValueError(f'must be a mapping such as {{"model": PATH}} (given: {quoted(raw)})')
    level = with_underscores(raw)
    kinds = [kind for kind in known if kind in level]
    if not kinds:
        given = ", ".join(map(quoted, level)) or "no key"
        raise ValueError(f"needs one of the kinds: {', '.join(known)} (given: {given})")
    if len(kinds) > 1:
        raise ValueError(f"has two kinds, '{kinds[0]}' and '{kinds[1]}': keep one")
    return {kinds[0]: level.pop(kinds[0]), **level}


def _kind(level: Any) -> str:
    if isinstance(level, LevelConfig):
        return level.kind
    return str(next(iter(level)))


def level_name(raw: Mapping[str, Any]) -> str:
    """A short name of a level as a user wrote it, which may be invalid."""
    return next((cls.short_name(raw[kind]) for kind, cls in KINDS.items() if kind in raw), "level")


def with_underscores(raw: Mapping[Any, Any]) -> dict[str, Any]:
    """The mapping with underscores for the dashes in its keys.

    Raises:
        ValueError: a key that is no printable text, or one given both ways.
    """
    mapping: dict[str, Any] = {}
    for key, value in raw.items():
        # Lone surrogates are text to JSON alone.
        if not (isinstance(key, str) and key.isprintable()):
            raise ValueError(f"has the key {quoted(key)}: keys must be printable text")
        name = key.replace("-", "_")
        if name in mapping:
            raise ValueError(
                f"has the key {quoted(name)} twice, with a dash and with an underscore: keep one"
            )
        mapping[name] = value
    return mapping
