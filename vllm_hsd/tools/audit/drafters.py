"""Which distributions a configuration drafts from, as far as `verify` can know them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_hsd.config.cascade_config import CascadeConfig

# Their drafts are functions of the text.
_LOOKUPS = ("ngram", "ngram_gpu", "suffix")
# Name of what is recorded.
OFFERS = "the drafts"


@dataclass(frozen=True)
class Drafter:
    """A model that drafts, and can be served by itself.

    Attributes:
        name: for the report, no other one's.
        model: path or name.
        temperature_scale: factor on the requests' temperatures.
        keys: of vLLM, which say what the model's files are.
    """

    name: str
    model: str
    temperature_scale: float = 1.0
    keys: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Drafters:
    """What a configuration drafts with.

    Attributes:
        models: those that are served by themselves.
        recorded: whether others draft too, which only the serving engine knows.
        certain: whether draft tokens without probabilities are functions of the text.
    """

    models: tuple[Drafter, ...] = ()
    recorded: bool = False
    certain: bool = False


def drafters_of(config: Mapping[str, Any]) -> Drafters:
    """The drafters of a `--speculative-config`.

    Raises:
        UserError: method "hsd" with keys that it does not know.
    """
    if config.get("method") != "hsd":
        model = config.get("model") if config.get("method") == "draft_model" else None
        soft = config.get("draft_sample_method", "greedy") == "probabilistic"
        certain = not soft or config.get("method") in _LOOKUPS
        models = (_drafter(model, 1.0, config),) if model else ()
        return Drafters(models, recorded=not (model and soft), certain=certain)
    cascade = CascadeConfig.parse({k: v for k, v in config.items() if k != "method"})
    every: list[Any] = [source for level in cascade.levels for source in level.drafters]
    served = dict.fromkeys(
        _drafter(source.model, source.temperature_scale, source.model_keys)
        for source in every
        if source.kind == "model"
    )
    names = [drafter.name for drafter in served]
    return Drafters(
        tuple(
            replace(each, name=f"{each.name} ({n})") if names.count(each.name) > 1 else each
            for n, each in enumerate(served, 1)
        ),
        recorded=any(source.kind != "model" for source in every),
        # What is verified without probabilities here is a lookup's: the drafts of coupled requests
        # are not recorded.
        certain=True,
    )


def keeps_seeds(config: Mapping[str, Any]) -> bool:
    """Whether a seed gives the text of vLLM without speculation, whatever is drafted."""
    return config.get("method") == "hsd" or (
        config.get("rejection_sample_method") == "hierarchical"
    )


def _drafter(model: str, scale: float, given: Mapping[str, Any]) -> Drafter:
    name, known = short_name(model), ("code_revision", "quantization", "revision")
    keys = tuple((key, given[key]) for key in known if key in given)
    return Drafter(name if scale == 1 else f"{name} x {scale:g}", model, scale, keys)


def short_name(model: str) -> str:
    """The end of a model's path or name."""
    return model.rstrip("/").rpartition("/")[2]
