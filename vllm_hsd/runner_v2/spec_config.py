"""`SpeculativeConfig` for method "hsd" on the V2 runner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from pydantic import SkipValidation
from vllm.config.utils import config
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

from vllm_hsd.config import CascadeConfig
from vllm_hsd.errors import UserError
from vllm_hsd.level_checks import connector_mistake
from vllm_hsd.levels import KINDS, LevelConfig
from vllm_hsd.runner_v2 import draft_lengths
from vllm_hsd.runner_v2.schedule import Schedule, compile_schedule
from vllm_hsd.shared_hooks import NeedsHooks
from vllm_hsd.spec_config import CascadeSpeculativeConfig
from vllm_hsd.stock_config import HierarchicalConfig
from vllm_hsd.verify import MAX_KERNEL_NODES

logger = init_logger(f"vllm.{__name__}")
# Where nothing else is configured: for as many requests the rows that drafts were drawn from take
# 0.16 GB for 8 tokens of a vocabulary of 152,000 in bfloat16, and above it decoding is no longer
# bound by the memory that it reads.
MAX_BATCH_SIZE = 64
# Tokens of the target's pass up to which further ones cost little on a GPU. Branches are computed
# whether they are there or not, so where nothing is configured they end at as many.
MAX_BRANCH_TOKENS = 256
# Drafts of a request by several lookups. Eight gave no more than four (docs/lab-notes.md).
DEFAULT_BRANCHES = 4


@config(repr=False)
class V2CascadeConfig(NeedsHooks, CascadeSpeculativeConfig):
    """What vLLM carries around for a cascade on V2; build it with `create`.

    Its method is "draft_model": vLLM 0.32 schedules asynchronously, and keeps slots in the cache,
    for methods that it knows.
    """

    hsd_method: ClassVar[str] = "draft_model"

    @classmethod
    def create(
        cls, raw: dict, target_model_config, target_parallel_config, arguments
    ) -> V2CascadeConfig | HierarchicalConfig:
        """See `CascadeSpeculativeConfig.create`; a head alone is vLLM's own drafter.

        Raises:
            UserError: it cannot be served.
        """
        target = target_model_config, target_parallel_config
        cascade = super().create(raw, *target, arguments)
        hsd = cascade.hsd
        if not cls.is_stock(hsd):
            return cascade
        keys = cls.stock_keys(hsd)
        if limit := hsd.disable_by_batch_size:
            keys["num_speculative_tokens_per_batch_size"] = _by_batch_size(cascade, limit)
        if len(hsd.levels[0].drafters) == 1:
            head = HierarchicalConfig.create(keys, *target)
        else:
            head = V2HeadSourcesConfig.create(keys, *target)
            head.hsd_sources = hsd.levels[0]
        head.hsd_couples_all = hsd.verifier == "coupled"
        return head

    @classmethod
    def check_runner(cls, hsd: CascadeConfig, target_parallel_config) -> None:
        """See `CascadeSpeculativeConfig.check_runner`."""
        _check(hsd, target_parallel_config, cls.is_stock(hsd))

    @classmethod
    def with_defaults(
        cls, hsd: CascadeConfig, target_model_config, arguments: EngineArgs
    ) -> CascadeConfig:
        """On a CPU, branches and adaptive drafting if they fit and the user does not decide."""
        if not draft_lengths.read_on_host():
            return hsd
        hsd = _with_branches(hsd, target_model_config, arguments)
        if "adaptive" in hsd.model_fields_set or cls.is_stock(hsd):
            return hsd
        adaptive = hsd.model_copy(update={"adaptive": True})
        reasons = {
            "a level that verifies nothing": bool(hsd.interleaved),
            "a model with branches": hsd.several_drafts,
            "horizontal_tokens": hsd.horizontal_tokens > 0,
            "enable_adaptive_verification": hsd.enable_adaptive_verification,
            "a KV connector": connector_mistake(adaptive, arguments) is not None,
        }
        for reason, holds in reasons.items():
            if holds:
                logger.info("Drafts have fixed lengths: %s excludes 'adaptive'.", reason)
                return hsd
        return adaptive

    def __post_init__(self) -> None:
        super().__post_init__()
        # Until `adapt` knows the scheduler's configuration.
        self.num_speculative_tokens_per_batch_size = _by_batch_size(self, default_limit(self.hsd))
        # Keeps vLLM from rows for every slot: the cascade keeps its own.
        self.draft_sample_method = "greedy"
        self.rejection_sample_method = "block"

    def adapt(self, scheduler_config) -> None:
        super().adapt(scheduler_config)
        largest = scheduler_config.max_num_seqs
        limit = self.max_batch_size(scheduler_config)
        learns = learns_one_length(self.hsd)
        if largest <= limit and learns:
            # vLLM captures the target for the lengths of the table, up to its largest batch;
            # `LearnedLengths` chooses among them.
            limit = max(largest - 1, 1)
        table = _by_batch_size(self, limit)
        # With one draft length, and no table, vLLM pads prefix hits to it, and captures them.
        one = largest < table[1][0] and not learns
        self.num_speculative_tokens_per_batch_size = None if one else table

    def max_batch_size(self, scheduler_config) -> int:
        """Most requests of a step that drafts."""
        tokens = scheduler_config.max_num_batched_tokens
        return max_batch_size(self.hsd, self._longest_query, tokens)

    @cached_property
    def _longest_query(self) -> int:
        # vLLM settles its configuration several times, and a long schedule takes a second or two.
        return longest_query(self.hsd, schedule_of(self.hsd))

    @property
    def hsd_couples_all(self) -> bool:
        """See `HierarchicalConfig`."""
        return self.hsd.verifier == "coupled"

    def use_ngram(self) -> bool:
        # Keeps the texts, which the lookup searches, in the GPU's memory.
        return searches_texts(self.hsd.levels)

    def use_eagle_block_drop(self) -> bool:
        # A head's entry at the last position of a block depends on the token after it.
        return reads_target_states(self.hsd)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return 0


def _with_branches(hsd: CascadeConfig, target_model_config, arguments: EngineArgs) -> CascadeConfig:
    """Several drafts of a request for sources that are lookups, where that was measured."""
    level = hsd.levels[0]
    if len(hsd.levels) > 1 or level.kind != "sources" or "branches" in level.model_fields_set:
        return hsd
    most, budget = DEFAULT_BRANCHES, arguments.max_num_batched_tokens
    if budget is not None:
        most = min(most, budget // (hsd.num_speculative_tokens + 1))
    found = level.model_copy(update={"branches": most})
    branching = hsd.model_copy(update={"levels": [found]})
    reasons = {
        "a source that is no lookup": not level.drafters[-1].is_lookup,
        "enable_adaptive_verification": hsd.enable_adaptive_verification,
        "multi-dimensional positions": target_model_config.uses_mrope,
        "a KV connector": connector_mistake(branching, arguments) is not None,
        "enable_dbo": arguments.enable_dbo,
        "max_num_batched_tokens": most < 2,
    }
    for reason, holds in reasons.items():
        if holds:
            logger.info("A request has one draft: %s excludes 'branches'.", reason)
            return hsd
    return branching


def reads_target_states(hsd: CascadeConfig) -> bool:
    """Whether a level reads hidden states of the target."""
    return any(source.reads_target_states for level in hsd.levels for source in level.drafters)


def longest_query(hsd: CascadeConfig, schedule: Schedule) -> int:
    """Most tokens that a request feeds to one forward pass: a head reads a step of the target."""
    steps = hsd.num_speculative_tokens + 1 if reads_target_states(hsd) else 0
    return max(schedule.longest_query, steps)


def max_batch_size(hsd: CascadeConfig, longest_query: int, max_num_batched_tokens: int) -> int:
    """Most requests of a step that drafts.

    torch.compile covers forward passes of at most max_num_batched_tokens.

    Args:
        longest_query: tokens that one request feeds to a forward pass at most.

    Raises:
        UserError: not even one request can draft.
    """
    limit = default_limit(hsd)
    if not longest_query:
        return limit
    if longest_query > max_num_batched_tokens:
        raise UserError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, but a request feeds "
            f"{longest_query} tokens to a level at once: raise it or lower num_tokens of the "
            "levels."
        )
    return min(limit, max_num_batched_tokens // longest_query)


def default_limit(hsd: CascadeConfig) -> int:
    """Most requests of a step that drafts, by the configuration of the cascade alone."""
    # Without `adaptive`, requests above the limit of branches draft a chain each.
    branching = most_with_branches(hsd) if hsd.adaptive else MAX_BATCH_SIZE
    return hsd.disable_by_batch_size or branching


def most_with_branches(hsd: CascadeConfig) -> int:
    """Most requests of a step whose drafts have branches; of a step that drafts without any."""
    if hsd.disable_by_batch_size or hsd.branches == 1 or draft_lengths.read_on_host():
        return hsd.disable_by_batch_size or MAX_BATCH_SIZE
    tokens = hsd.branches * (hsd.num_speculative_tokens + 1)
    return min(MAX_BATCH_SIZE, max(1, MAX_BRANCH_TOKENS // tokens))


def _by_batch_size(cascade: V2CascadeConfig, limit: int) -> list[tuple[int, int, int]]:
    """The longest drafts; with `adaptive` each shorter length once, to be captured.

    Without it, chains alone where there are more requests than branches are for.
    """
    rows, most = cascade.hsd.branches, most_with_branches(cascade.hsd)
    if most < limit and not cascade.hsd.adaptive:
        chain = cascade.hsd.num_speculative_tokens
        longest = cascade.num_speculative_tokens
        return [(1, most, longest), (most + 1, limit, chain), (limit + 1, limit + 1, 0)]
    shorter = [rows * (n + 1) - 1 for n in ladder_of(cascade.hsd)[1:limit]]
    first = limit - len(shorter)
    each = [(first + i, first + i, n) for i, n in enumerate(shorter, 1)]
    return [(1, first, cascade.num_speculative_tokens), *each, (limit + 1, limit + 1, 0)]


@config(repr=False)
class V2HeadSourcesConfig(HierarchicalConfig):
    """Of a head of the target that drafts next to lookups; `hsd_sources`: the level of both."""

    hsd_sources: SkipValidation[Any] = None

    def use_ngram(self) -> bool:
        return self.hsd_sources is not None and searches_texts([self.hsd_sources])


def searches_texts(levels: Iterable[LevelConfig]) -> bool:
    """Whether a level searches the requests' own texts."""
    kinds = {source.kind for level in levels for source in level.drafters}
    return not kinds.isdisjoint(("ngram", "suffix", "ngram_model"))


def _check(hsd: CascadeConfig, target_parallel_config, is_stock: bool) -> None:
    """Check what V2 cannot do.

    Raises:
        UserError: names the key.
    """
    launcher = target_parallel_config.distributed_executor_backend
    if learns_one_length(hsd) and launcher == "external_launcher":
        raise UserError(
            "adaptive does not run with external_launcher, where every rank schedules by its own "
            "clock: remove adaptive."
        )
    for i, level in enumerate(hsd.levels):
        for name, source in level.named_sources(f"levels[{i}]"):
            if not source.on_v2 and not is_stock:
                known = ", ".join(kind for kind, cls in KINDS.items() if cls.on_v2)
                raise UserError(
                    f"{name}.{source.kind} drafts alone, without other levels or sources, which "
                    f"may be of the kinds {known}: keep it alone."
                )
        level.check_v2(f"levels[{i}]")
    if hsd.several_drafts and not is_stock:
        _check_several_drafts(hsd)
    if is_stock:
        V2CascadeConfig.check_stock(hsd, ("block", "coupled"))
    schedule_of(hsd)


def _check_several_drafts(hsd: CascadeConfig) -> None:
    """Check what V2's kernels cannot do with several drafts of a model.

    Raises:
        UserError: names the key.
    """
    nodes, options = hsd.branches * hsd.num_speculative_tokens, hsd.options()[0]
    if nodes > MAX_KERNEL_NODES:
        raise UserError(
            f"levels[0].branches and num_speculative_tokens make {nodes} draft tokens of a "
            f"request, but tree verification takes at most {MAX_KERNEL_NODES}: lower "
            "one of them."
        )
    for key, holds in {
        "verifier": hsd.verifier == "standard",
        "levels[0].stopping": options.stopping != "fixed",
    }.items():
        if holds:
            raise UserError(
                f"{key} does not go with levels[0].branches of a model, whose drafts are verified "
                "together by Traversal Verification: remove it."
            )


def verifiers(hsd: CascadeConfig) -> list[str]:
    """How each level verifies the one below; the first is not used."""
    return [options.verifier for options in hsd.options()]


def schedule_of(hsd: CascadeConfig, longest: int | None = None) -> Schedule:
    """The fixed schedule of a cascade.

    Args:
        longest: most tokens of a proposal, with at least one for each level before the horizontal
            ones; None for the configured number.

    Raises:
        UserError: what a fixed schedule cannot do.
    """
    options, lowest = list(hsd.options()), hsd.levels[0]
    if hsd.adaptive and draft_lengths.read_on_host() and lowest.last_on_v2 == "lookup":
        # Right below the target a lookup costs nothing but verification.
        options[0].draft_length = options[-1].draft_length
    longest_drafts = options[0].draft_length, options[-1].draft_length
    if longest is not None:
        options[-1] = replace(options[-1], draft_length=longest)
        room = longest - hsd.horizontal_tokens
        for k in reversed(range(len(options) - 1)):
            room = min(options[k].draft_length, room - 1)
            options[k] = replace(options[k], draft_length=room)
    return compile_schedule(
        options,
        lookup=lowest.last_on_v2 == "lookup",
        chooses=lowest.on_v2 == "lookup" != lowest.last_on_v2,
        drafts=hsd.branches if hsd.several_drafts else 1,
        horizontal_tokens=hsd.horizontal_tokens,
        longest_drafts=longest_drafts,
        bounded=not draft_lengths.read_on_host(),
    )


def learns_one_length(hsd: CascadeConfig) -> bool:
    """Whether `adaptive` chooses a length for all requests of a step, before it is scheduled.

    Not where scheduling waits for drafts, of any length.
    """
    return hsd.adaptive and not draft_lengths.read_on_host()


def ladder_of(hsd: CascadeConfig) -> list[int]:
    """Draft lengths that the scheduler may choose between, longest first; the first is configured.

    With `adaptive` a half and a quarter of it too: vLLM captures the target for each length. With
    `branches` they are those of one row.
    """
    longest = hsd.num_speculative_tokens
    shorter = {longest // 2, longest // 4} if learns_one_length(hsd) else set()
    return [longest, *sorted((n for n in shorter if n >= shortest_of(hsd)), reverse=True)]


def shortest_of(hsd: CascadeConfig) -> int:
    """Tokens of the shortest proposal: one of every level."""
    return len(hsd.levels) + hsd.horizontal_tokens
