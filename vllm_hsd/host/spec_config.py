"""`SpeculativeConfig` for method "hsd": ours outside, one of vLLM's own per level inside."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from pydantic import Field, SkipValidation
from vllm.config.compilation import CUDAGraphMode
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.utils.hashing import safe_hash

from vllm_hsd.cascade.row_layout import PrivateBlocks
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.defaults import with_defaults, with_models_as_levels
from vllm_hsd.config.level_checks import check_cascade, check_serving
from vllm_hsd.config.sizes import (
    by_batch_size,
    default_limit,
    learns_one_length,
    longest_query,
    max_batch_size,
    reads_target_states,
    reads_texts,
    schedule_of,
)
from vllm_hsd.errors import UserError, collected, quoted
from vllm_hsd.host.engine_hooks import NeedsHooks
from vllm_hsd.host.stock_config import HierarchicalConfig
from vllm_hsd.levels import Target

logger = init_logger(f"vllm.{__name__}")


@config(repr=False)
class CascadeSpeculativeConfig(NeedsHooks, SpeculativeConfig):
    """What vLLM carries around for a cascade; build it with `create`."""

    method: str | None = None  # type: ignore[assignment]
    """"draft_model": vLLM 0.32 schedules asynchronously, and keeps slots in the cache, for methods
    that it knows."""
    hsd: SkipValidation[Any] = None
    """The parsed `CascadeConfig`."""
    level_configs: SkipValidation[list] = Field(default_factory=list)
    """One stock `SpeculativeConfig` of its own method per level, None where no model loads."""
    hsd_level_names: SkipValidation[list] = Field(default_factory=list)
    """What messages call each level: as the user has numbered them."""

    @classmethod
    def create(
        cls, raw: dict, target_model_config, target_parallel_config, arguments: EngineArgs
    ) -> CascadeSpeculativeConfig | HierarchicalConfig:
        """Check the user's keys against the target and the engine's arguments.

        Returns:
            vLLM's own configuration, with our verifier, where vLLM's drafter serves a head alone.

        Raises:
            UserError: a sentence for every mistake, which names the key and the fix.
        """
        keys = {key: value for key, value in raw.items() if key != "method"}
        hsd = with_defaults(CascadeConfig.parse(keys), arguments)
        mistakes: list[str] = []
        with collected(mistakes):
            check_serving(hsd, target_parallel_config)
        if target_model_config.runner_type == "pooling":
            mistakes.append(
                "runner 'pooling' generates no tokens that method 'hsd' could draft: remove the "
                "speculative configuration."
            )
        both = target_model_config, target_parallel_config
        level_configs = check_cascade(hsd, Target(*both), arguments, mistakes)
        if mistakes:
            raise UserError(*mistakes)
        if hsd.untested:
            logger.warning_once(
                "No cascade was ever tested on a target that keeps recurrent state, as %s does.",
                target_model_config.model,
            )
        if hsd.is_stock:
            return _stock_config(hsd, *both)
        names = [each.named_sources(f"levels[{i}]")[-1][0] for i, each in enumerate(hsd.levels)]
        hsd = with_models_as_levels(hsd)
        if len(hsd.levels) > len(names):
            # Lookups load nothing.
            level_configs, names = [None, *level_configs], ["levels[0]", *names]
        return cls(
            method="draft_model",
            hsd=hsd,
            level_configs=level_configs,
            hsd_level_names=names,
            num_speculative_tokens=hsd.scheduled_tokens,
            enable_adaptive_verification=hsd.enable_adaptive_verification,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )

    def __post_init__(self) -> None:
        # Code of vLLM that knows one drafter sees the highest level that is a model of its own, or
        # an EAGLE-3 head: the runner reads from it which states of the target to keep.
        models = [level for level in self.level_configs if level is not None]
        models.sort(key=lambda level: level.method == "eagle3")
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        if models:
            self.draft_model_config = models[-1].draft_model_config
            self.draft_parallel_config = models[-1].draft_parallel_config
        self.model = self.draft_model_config.model
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        # Until `adapt` knows the scheduler's configuration.
        self.num_speculative_tokens_per_batch_size = by_batch_size(
            self.hsd, default_limit(self.hsd)
        )
        # Keeps vLLM from rows for every slot: the cascade keeps its own.
        self.draft_sample_method = "greedy"
        self.rejection_sample_method = "block"

    def adapt(self, scheduler_config) -> None:
        largest = scheduler_config.max_num_seqs
        limit = self.max_batch_size(scheduler_config)
        learns = learns_one_length(self.hsd)
        if largest <= limit and learns:
            # vLLM captures the target for the lengths of the table, up to its largest batch;
            # `LearnedLengths` chooses among them.
            limit = max(largest - 1, 1)
        table = by_batch_size(self.hsd, limit)
        budget = scheduler_config.max_num_scheduled_tokens
        budget = budget or scheduler_config.max_num_batched_tokens
        threshold = scheduler_config.long_prefill_token_threshold or budget
        # With one draft length, and no table, vLLM pads prefix hits to it, and captures them. It
        # waits for ever, or ends, where so many tokens do not fit.
        pads = self.num_speculative_tokens < min(budget, threshold)
        one = largest < table[1][0] and not learns and pads
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
        return self.hsd.verifier == "coupled"

    def use_ngram(self) -> bool:
        # Keeps the texts, which the lookup searches, in the GPU's memory.
        return reads_texts(self.hsd.levels)

    def use_eagle_block_drop(self) -> bool:
        # A head's entry at the last position of a block depends on the token after it.
        return reads_target_states(self.hsd)

    def draft_shares_target_positions(self) -> bool:
        # Of vLLM 0.33, which would lower max_model_len: past a level's context nothing is drafted.
        return True

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return 0

    def lookahead(self, vllm_config: Any) -> int | None:
        """Tokens past those that the target computes for which a request has slots.

        None: as vLLM reserves them, without branches.

        Args:
            vllm_config: vLLM's.
        """
        blocks = vllm_config.cache_config.num_gpu_blocks
        # vLLM 0.33 compares it with its budget of tokens before there is a cache.
        if self.hsd.branches == 1 or blocks is None:
            return None
        return self._private_blocks(vllm_config).lookahead(self.hsd.branches)

    def branch_mistakes(self, vllm_config: Any) -> Iterator[str]:
        """Why no runner can host the branches: a sentence for each reason."""
        parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
        refused = {
            "pipeline parallelism: remove branches": parallel.pipeline_parallel_size > 1,
            "context parallelism: remove branches": parallel.decode_context_parallel_size > 1
            or parallel.prefill_context_parallel_size > 1,
            "kv_sharing_fast_prefill: remove one of them": cache.kv_sharing_fast_prefill,
            "an encoder: remove branches": vllm_config.model_config.is_encoder_decoder,
            "enable_return_routed_experts: remove it": vllm_config.aux_output_config.enabled,
            "full CUDA graphs of prompts: set cudagraph_mode to FULL_AND_PIECEWISE": (
                vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL
            ),
        }
        for reason, holds in refused.items():
            if holds:
                yield f"levels[0].branches does not run with {reason}."
        requests = vllm_config.scheduler_config.max_num_seqs
        if self.hsd.branches > requests:
            yield (
                f"levels[0].branches takes {self.hsd.branches} rows of attention for a request, "
                f"and there are max_num_seqs={requests} in all: raise that, or lower branches."
            )
        tokens = self.num_speculative_tokens + 1
        budget = vllm_config.scheduler_config.max_num_batched_tokens
        if tokens > budget:
            # vLLM would wait for ever to schedule a request that it has padded to so many.
            yield (
                f"levels[0].branches and num_speculative_tokens make {tokens} tokens of a request, "
                f"above max_num_batched_tokens={budget}: raise it or lower one of them."
            )

    def _private_blocks(self, vllm_config: Any) -> PrivateBlocks:
        return PrivateBlocks(vllm_config.cache_config.block_size, self.hsd.num_speculative_tokens)

    def room_mistake(self, vllm_config: Any, blocks: int, groups: int) -> str | None:
        """Why a KV cache of so many blocks and groups has no room for branches of every request."""
        rows, size = self.hsd.branches, vllm_config.cache_config.block_size
        requests = vllm_config.scheduler_config.max_num_seqs
        layout = self._private_blocks(vllm_config)
        needed = -(-layout.lookahead(rows) // size) * groups
        if requests * needed > blocks:
            return (
                f"levels[0].branches reserves {needed} blocks of the KV cache for each of "
                f"max_num_seqs={requests} requests, and the cache has {blocks}: lower branches or "
                "max_num_seqs, or enlarge the cache."
            )
        longest = vllm_config.model_config.max_model_len
        behind = int(layout.first(np.zeros(1), rows)[0]) * size
        if behind > longest:
            return (
                f"levels[0].branches takes {behind} tokens of max_model_len={longest} with blocks "
                f"of {size}: raise max_model_len, or lower branches or block_size."
            )
        return None

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """Every level has been checked."""

    def compute_hash(self) -> str:
        models = [level.compute_hash() for level in self.level_configs if level is not None]
        return safe_hash(
            str(("hsd", models, self.hsd.model_dump_json())).encode(),
            usedforsecurity=False,
        ).hexdigest()

    def __repr__(self) -> str:
        names = [level.description for level in self.hsd.levels]
        return (
            f"SpeculativeConfig(method='hsd', levels={names}, "
            f"num_spec_tokens={self.hsd.num_speculative_tokens}, verifier={self.hsd.verifier!r}, "
            f"adaptive={self.hsd.adaptive})"
        )


@config(repr=False)
class HeadSourcesConfig(HierarchicalConfig):
    """Of a head of the target that drafts next to lookups; `hsd_sources`: the level of both."""

    hsd_sources: SkipValidation[Any] = None

    def use_ngram(self) -> bool:
        return self.hsd_sources is not None and reads_texts([self.hsd_sources])


def _stock_config(
    hsd: CascadeConfig, model_config: Any, parallel_config: Any
) -> HierarchicalConfig:
    """vLLM's own configuration of the head alone, or next to lookups, with our verifier."""
    lowest = hsd.levels[0]
    keys = {
        "num_speculative_tokens": hsd.num_speculative_tokens,
        **lowest.drafters[-1].stock_keys,
        "draft_sample_method": "probabilistic",
    }
    if hsd.enable_adaptive_verification:
        keys["enable_adaptive_verification"] = True
    if limit := hsd.disable_by_batch_size:
        keys["num_speculative_tokens_per_batch_size"] = by_batch_size(hsd, limit)
    made = HierarchicalConfig if len(lowest.drafters) == 1 else HeadSourcesConfig
    head = made.create(keys, model_config, parallel_config)
    if isinstance(head, HeadSourcesConfig):
        head.hsd_sources = lowest
    head.hsd_couples_all = hsd.verifier == "coupled"
    name, source = lowest.named_sources("levels[0]")[-1]
    head.hsd_named = f"{name}.{source.kind} {quoted(head.model)}"
    return head
