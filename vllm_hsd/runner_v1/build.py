"""Everything that drafts on the V1 runner, in the order in which it is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.drafts import DraftStore
from vllm_hsd.core.levels import LevelOptions, Sources
from vllm_hsd.errors import quoted
from vllm_hsd.levels import LevelConfig
from vllm_hsd.levels.base import Place
from vllm_hsd.runner_v1.adaptive import StepClock
from vllm_hsd.runner_v1.eagle3 import Eagle3Level
from vllm_hsd.runner_v1.head_states import HeadStates
from vllm_hsd.runner_v1.lazy_caches import LazyCaches
from vllm_hsd.runner_v1.request_state import RequestState
from vllm_hsd.runner_v1.requests import RequestTable

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True)
class HostedLevel:
    """A level that a V1 runner hosts.

    Attributes:
        config: the user's keys.
        options: how it takes part in the cascade.
        level: what the cascade drafts with: a level or a `Sources`.
        model: its model, which may be the last of several sources; None for lookups alone.
        loads: vLLM's configuration of that model if it is loaded, else None.
        named: what messages call the model, "levels[i].model 'path'".
    """

    config: LevelConfig
    options: LevelOptions
    level: Any
    model: Any
    loads: Any
    named: str


def build_levels(vllm_config: VllmConfig, runner: Any) -> list[HostedLevel]:
    """The levels that a configuration describes, not yet loaded.

    Args:
        vllm_config: the target's configuration.
        runner: the V1 runner that hosts the target.
    """
    speculative: Any = vllm_config.speculative_config
    hsd, hosted = speculative.hsd, []
    for i, (config, options) in enumerate(zip(hsd.levels, hsd.options(), strict=True)):
        loads = speculative.level_configs[i]
        longest = loads.draft_model_config if loads else vllm_config.model_config
        level = config.build_v1(Place(runner, vllm_config, i, longest.max_model_len))
        if hsd.adaptive and i == 0 and not (isinstance(level, Sources) or hsd.horizontal_tokens):
            # The one source of a level that may choose not to draft.
            sources = ([level], None) if config.is_lookup else ([], level)
            level = Sources([config.kind], *sources)
        model = level.drafter if isinstance(level, Sources) else level
        name, source = config.named_sources(f"levels[{i}]")[-1]
        named = f"{name}.{source.kind}"
        if loads is not None:
            named += f" {quoted(loads.model)}"
        hosted.append(HostedLevel(config, options, level, model, loads, named))
    return hosted


def with_sources(
    hosted: Sequence[HostedLevel], place: int, sources: list[int], adaptive: bool
) -> list[HostedLevel]:
    """The hosted levels, one of them with some of its sources; a single one drafts as if alone.

    Raises:
        ValueError: it has no such sources.
    """
    several = hosted[place].level
    if not isinstance(several, Sources) or not set(sources) <= set(range(len(several.names))):
        raise ValueError(f"sources {sources} are not those of level {place}.")
    found = list(hosted)
    some = several.only(sources)
    alone = len(sources) == 1 and not adaptive
    level = next(iter(some.lookups), some.drafter) if alone else some
    found[place] = replace(hosted[place], level=level)
    return found


class Drafting(NamedTuple):
    """What drafts with some of the hosted levels.

    Attributes:
        cascade: the recursion over the levels.
        requests: what is kept of the requests in progress.
        table: gives them their slots.
        heads: keep the caches of EAGLE-3 heads in step with the text.
        lazy: notes which blocks levels have filled; None where all fill all.
        clock: times the target's steps.
    """

    cascade: Cascade
    requests: RequestState
    table: RequestTable
    heads: list[HeadStates]
    lazy: LazyCaches | None
    clock: StepClock


def build(
    hosted: Sequence[HostedLevel],
    levels: list[int],
    draft_lengths: list[int],
    vllm_config: VllmConfig,
    runner: Any,
) -> Drafting:
    """Build what drafts with some of the hosted levels. Nothing is known of any request yet.

    Args:
        hosted: all levels of the engine, see `build_levels`.
        levels: numbers of those that draft, cheapest first.
        draft_lengths: one per level; the last is the draft that the target verifies.
        vllm_config: the target's configuration.
        runner: the V1 runner that hosts the target.

    Raises:
        ValueError: unknown levels, or draft lengths that the engine was not started for.
    """
    speculative: Any = vllm_config.speculative_config
    hsd, known = speculative.hsd, set(range(len(hosted)))
    if not levels or len(set(levels)) < len(levels) or not set(levels) <= known:
        raise ValueError(f"levels {levels} are not a cascade of the {len(hosted)} hosted.")
    if len(draft_lengths) != len(levels) or min(draft_lengths) < 1:
        raise ValueError(
            f"draft_lengths {draft_lengths} do not give each of levels {levels} a token."
        )
    if draft_lengths[-1] > hsd.num_speculative_tokens:
        raise ValueError(
            f"draft_lengths {draft_lengths} end above num_speculative_tokens="
            f"{hsd.num_speculative_tokens}."
        )
    cascade = Cascade(
        [hosted[i].level for i in levels],
        [
            replace(hosted[i].options, draft_length=length)
            for i, length in zip(levels, draft_lengths, strict=True)
        ],
        vllm_config.scheduler_config.max_num_seqs,
        hsd.horizontal_tokens,
        hsd.adaptive,
        hsd.branches,
    )
    for slot in range(vllm_config.scheduler_config.max_num_seqs):
        cascade.forget(slot)  # lookups outlive a selection: what they kept of requests goes
    requests = RequestState.allocate(cascade)
    table = RequestTable(runner, cascade, requests, hsd.verifier == "coupled")
    heads = [
        HeadStates(level, k, requests)
        for k, level in enumerate(cascade.levels)
        if isinstance(level, Eagle3Level)
    ]
    late = hsd.adaptive or hosted[levels[0]].config.fills_cache_lazily
    lazy = LazyCaches(runner, requests) if late else None
    clock = StepClock(hsd.branches * (hsd.num_speculative_tokens + 1))
    drawn = [d for level, d in zip(cascade.levels, cascade.drafts, strict=True) if level]
    if hsd.several_drafts and cascade.branches is not None:
        drawn += cascade.branches.drafts
    _reserve(drawn, vllm_config.model_config.get_vocab_size(), runner.device)
    return Drafting(cascade, requests, table, heads, lazy, clock)


def _reserve(stores: list[DraftStore], vocab_size: int, device: torch.device) -> None:
    """Reserve the proposal probabilities before vLLM profiles its memory."""
    for drafts in stores:
        drafts.allocate(vocab_size, torch.float32, device)
    logger.info(
        "Proposal probabilities take up to %.2f GiB: max_num_seqs x draft lengths x vocabulary x "
        "4 bytes%s.",
        sum(drafts.probs.nbytes for drafts in stores if drafts.probs is not None) / 2**30,
        "; on a CPU only as much as sampled requests use" if device.type == "cpu" else "",
    )
