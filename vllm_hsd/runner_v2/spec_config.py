"""`SpeculativeConfig` for method "hsd" on the V2 runner."""

from __future__ import annotations

from typing import ClassVar

from vllm.config.utils import config

from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.levels import LevelOptions
from vllm_hsd.core.schedule import Schedule, compile_schedule
from vllm_hsd.errors import UserError
from vllm_hsd.runner_v2.hooks import NeedsHooks
from vllm_hsd.spec_config import CascadeSpeculativeConfig

KINDS = ("model", "early_exit", "exit_head", "ngram", "bigram")
# Levels that find their drafts without forward passes: only the lowest.
LOOKUPS = ("ngram", "bigram")
# Where nothing else is configured: for as many requests the rows that drafts were drawn from take
# 0.16 GB for 8 tokens of a vocabulary of 152,000 in bfloat16, and above it decoding is no longer
# bound by the memory that it reads.
MAX_BATCH_SIZE = 64
_USE_V1 = "set VLLM_USE_V2_MODEL_RUNNER=0 for the V1 runner"


@config(repr=False)
class V2CascadeConfig(NeedsHooks, CascadeSpeculativeConfig):
    """What vLLM carries around for a cascade on V2; build it with `create`.

    Its method is "draft_model": vLLM 0.32 schedules asynchronously, and keeps slots in the cache,
    for methods that it knows.
    """

    hsd_runner: ClassVar[str] = "V2"
    hsd_method: ClassVar[str] = "draft_model"

    @classmethod
    def create(cls, raw: dict, target_model_config, target_parallel_config, arguments):
        cascade = super().create(raw, target_model_config, target_parallel_config, arguments)
        longest = target_model_config.max_model_len
        for i, level in enumerate(cascade.level_configs):
            found = longest if level is None else level.draft_model_config.max_model_len
            if found < longest:
                raise UserError(
                    f"levels[{i}].model reads {found} tokens, fewer than max_model_len "
                    f"({longest}), which V2's cascades cannot do: lower max_model_len or {_USE_V1}."
                )
        return cascade

    @classmethod
    def check_runner(cls, hsd: CascadeConfig) -> None:
        if hsd.adaptive and hsd.adaptive.profile:
            raise UserError(
                "adaptive.profile has no meaning on vLLM's V2 runner, since `vllm-hsd profile` "
                f'measures the V1 runner: give "adaptive": true or {_USE_V1}.'
            )
        for i, level in enumerate(hsd.levels):
            if level.kind not in KINDS:
                raise UserError(
                    f"levels[{i}].{level.kind} does not run on vLLM's V2 runner, which takes the "
                    f"kinds {', '.join(KINDS)}: {_USE_V1}."
                )
            if level.kind == "bigram":
                _check_bigram(f"levels[{i}]", i, level)
        schedule_of(hsd)

    def __post_init__(self) -> None:
        super().__post_init__()
        limit, length = max_batch_size(self.hsd), self.num_speculative_tokens
        self.num_speculative_tokens_per_batch_size = [(1, limit, length), (limit + 1, limit + 1, 0)]
        # Keeps vLLM from rows for every slot: the cascade keeps its own.
        self.draft_sample_method = "greedy"
        self.rejection_sample_method = "block"

    def adapt(self, scheduler_config) -> None:
        super().adapt(scheduler_config)
        always = scheduler_config.max_num_seqs <= max_batch_size(self.hsd)
        if always and not self.hsd.adaptive:
            # With one draft length vLLM pads prefix hits to it, and captures them.
            self.num_speculative_tokens_per_batch_size = None

    def use_ngram(self) -> bool:
        # Keeps the texts, which the lookup searches, in the GPU's memory.
        return self.hsd.levels[0].kind == "ngram"

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return 0


def max_batch_size(hsd: CascadeConfig) -> int:
    """Most requests of a step that drafts."""
    return hsd.disable_by_batch_size or MAX_BATCH_SIZE


def _check_bigram(name: str, index: int, level) -> None:
    if index > 0:
        raise UserError(
            f"{name}.bigram verifies levels[{index - 1}], but on vLLM's V2 runner a bigram table "
            f"drafts its likeliest successors and verifies nothing: put it first or {_USE_V1}."
        )
    if level.temperature_scale != 1:
        raise UserError(
            f"{name}.temperature_scale has no meaning on vLLM's V2 runner, where a bigram table "
            f"drafts its likeliest successors: remove it or {_USE_V1}."
        )


def verifiers(hsd: CascadeConfig) -> list[str]:
    """How each level verifies the one below; the first is not used."""
    return [level.verifier or hsd.verifier for level in hsd.levels]


def schedule_of(hsd: CascadeConfig) -> Schedule:
    """The fixed schedule of a cascade.

    Raises:
        UserError: what a fixed schedule cannot do.
    """
    options = [
        LevelOptions(length, max_rounds=level.max_rounds, stopping=level.stopping)
        for level, length in zip(hsd.levels, hsd.draft_lengths, strict=True)
    ]
    return compile_schedule(
        options,
        lookup=hsd.levels[0].kind in LOOKUPS,
        horizontal_tokens=hsd.horizontal_tokens,
    )
