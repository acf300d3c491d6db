"""Several sources, of which the most promising ones draft."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.levels.any_kind import Source, level_name
from vllm_hsd.levels.base import (
    KINDS,
    BranchKeys,
    LevelConfig,
    LookupKeys,
    Probability,
)

MAX_SOURCES = 8


class SourcesLevelConfig(BranchKeys):
    """Several sources, of which the most promising ones draft: lookups, then at most one other.

    Attributes:
        sources: the sources.
        min_acceptance: a lookup's draft ends before the token that is less likely to be accepted.
    """

    # Built when all kinds of sources are known.
    model_config = ConfigDict(defer_build=True)

    kind = "sources"
    is_source = False
    only_lowest = "its sources only draft"
    drafts_by = "lookup"

    sources: Annotated[list[Source], Field(min_length=1, max_length=MAX_SOURCES)]
    min_acceptance: Probability = 0.05

    @property
    def drafters(self) -> list[LevelConfig]:
        return self.sources

    @property
    def fills_cache_lazily(self) -> bool:
        """A head keeps states of the target's, of its last steps."""
        last = self.sources[-1]
        return last.keeps_cache and not last.reads_target_states

    @property
    def last_drafts_by(self) -> str:
        return self.sources[-1].drafts_by

    @property
    def names(self) -> list[str]:
        """A name for each source: its kind, numbered where a kind is there twice."""
        kinds = [source.kind for source in self.sources]
        return [
            kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: i + 1].count(kind)}"
            for i, kind in enumerate(kinds)
        ]

    @property
    def description(self) -> list[str]:
        return self.names

    @classmethod
    def short_name(cls, value: object) -> str:
        if not isinstance(value, list):
            return cls.kind
        return "+".join(level_name(source) for source in value if isinstance(source, dict))

    def named_sources(self, name: str) -> list[tuple[str, LevelConfig]]:
        return [(f"{name}.sources[{j}]", source) for j, source in enumerate(self.sources)]

    def options(self, draft_length: int, verifier: str) -> LevelOptions:
        """Those of the last source; lookups have none."""
        return self.sources[-1].options(draft_length, verifier)

    def build(self, speculator: Any, index: int) -> Any:
        from vllm_hsd.budget.source_choice import SourcesLookup

        device = speculator.device
        lookups = [each for each in self.sources if isinstance(each, LookupKeys)]
        built = [(each.build(speculator, 0), each.estimates(device)) for each in lookups]
        return SourcesLookup(
            built,
            self.min_acceptance,
            speculator.max_num_reqs,
            speculator.schedule.kept_lengths[0],
            device,
            has_drafter=len(lookups) < len(self.sources),
            rows=self.branches,
            batch=speculator.state.batch,
        )

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.branches > 1 and not self.sources[-1].is_lookup:
            raise ValueError(
                "has branches, which are for a model and for sources that are all lookups: remove "
                "them"
            )
        for i, source in enumerate(self.sources):
            if i < len(self.sources) - 1 and not source.is_lookup:
                lookups = ", ".join(kind for kind, cls in KINDS.items() if cls.is_lookup)
                raise ValueError(
                    f"has sources[{i}] of kind '{source.kind}' before others: lookups ({lookups}) "
                    "come first, and one source of another kind may be the last"
                )
            for key in ("num_tokens", "verifier", "max_rounds", "branches"):
                if getattr(source, key, None) is not None and key in source.model_fields_set:
                    raise ValueError(
                        f"has sources[{i}].{key}, which a source does not take: remove it"
                        + (" or give it to the level" if key in ("num_tokens", "branches") else "")
                    )
        if len(self.sources) == 1 and not self.sources[0].is_lookup:
            raise ValueError(
                f"has one source, of kind '{self.sources[0].kind}', and no lookup next to it: give "
                "its keys to the level"
            )
        return self
