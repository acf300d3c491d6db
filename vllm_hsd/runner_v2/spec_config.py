"""`SpeculativeConfig` for method "hsd" on the V2 runner."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, SkipValidation, ValidationError
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.utils.hashing import safe_hash

from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.exit_head import EXIT_ARCHITECTURES
from vllm_hsd.core.levels import LevelOptions
from vllm_hsd.core.schedule import Schedule, compile_schedule
from vllm_hsd.errors import UserError, quoted, refusal
from vllm_hsd.level_config import ModelLevelConfig
from vllm_hsd.runner_v2.hooks import NeedsHooks

KINDS = ("model", "early_exit", "exit_head", "ngram")
_USE_V1 = "set VLLM_USE_V2_MODEL_RUNNER=0 for the V1 runner"


@config
class CascadeSpeculativeConfig(NeedsHooks, SpeculativeConfig):
    """What vLLM carries around for a cascade on V2; build it with `create`.

    Its method is "draft_model": vLLM 0.32 schedules asynchronously, and keeps slots in the cache,
    for methods that it knows.
    """

    hsd_runner: ClassVar[str] = "V2"
    hsd_applies_min_p: ClassVar[bool] = True
    hsd: SkipValidation[Any] = None
    """The parsed `CascadeConfig`."""
    level_configs: SkipValidation[list] = Field(default_factory=list)
    """One stock `SpeculativeConfig(method="draft_model")` per level, None where no model loads."""

    @classmethod
    def create(cls, raw: dict, target_model_config, target_parallel_config):
        """Check the user's keys and build the configuration.

        Raises:
            UserError: one sentence that names the key and the fix.
        """
        hsd = CascadeConfig.parse({key: value for key, value in raw.items() if key != "method"})
        _check_target(target_model_config, target_parallel_config)
        if hsd.adaptive:
            raise UserError(f"adaptive does not run on vLLM's V2 runner: remove it or {_USE_V1}.")
        schedule_of(hsd)
        levels: list[SpeculativeConfig | None] = []
        for i, (level, length) in enumerate(zip(hsd.levels, hsd.draft_lengths, strict=True)):
            _check_level(f"levels[{i}]", level, target_model_config)
            levels.append(
                _model_config(
                    f"levels[{i}]", level, length, target_model_config, target_parallel_config
                )
                if isinstance(level, ModelLevelConfig)
                else None
            )
        return cls(
            method="draft_model",
            hsd=hsd,
            level_configs=levels,
            num_speculative_tokens=hsd.num_speculative_tokens,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )

    def __post_init__(self) -> None:
        models = [level for level in self.level_configs if level is not None]
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        if models:
            self.draft_model_config = models[-1].draft_model_config
            self.draft_parallel_config = models[-1].draft_parallel_config
        self.model = self.draft_model_config.model
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        # Keeps vLLM from rows for every slot: the cascade keeps its own.
        self.draft_sample_method = "greedy"
        self.rejection_sample_method = "block"

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return 0

    def compute_hash(self) -> str:
        models = [level.compute_hash() for level in self.level_configs if level is not None]
        return safe_hash(
            str(("hsd V2", models, self.hsd.model_dump_json())).encode(), usedforsecurity=False
        ).hexdigest()

    def __repr__(self) -> str:
        names = [getattr(level, level.kind) for level in self.hsd.levels]
        return (
            f"SpeculativeConfig(method='hsd', levels={names}, "
            f"num_spec_tokens={self.num_speculative_tokens}, verifier={self.hsd.verifier!r})"
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
        lookup=hsd.levels[0].kind == "ngram",
        horizontal_tokens=hsd.horizontal_tokens,
    )


def _check_target(model_config, parallel_config) -> None:
    if parallel_config.pipeline_parallel_size > 1 or parallel_config.data_parallel_size > 1:
        raise UserError(
            "method 'hsd' runs with tensor parallelism only: set pipeline_parallel_size and "
            "data_parallel_size to 1."
        )
    if parallel_config.decode_context_parallel_size > 1:
        raise UserError(
            "method 'hsd' does not run with decode_context_parallel_size above 1: set it to 1."
        )
    if model_config.is_hybrid or model_config.is_attention_free or model_config.uses_mrope:
        raise UserError(
            f"method 'hsd' does not serve the target {quoted(model_config.model)}, which keeps "
            "recurrent state or has multi-dimensional positions: use an attention-only text model."
        )


def _check_level(name: str, level, target_config) -> None:
    if level.kind not in KINDS:
        raise UserError(
            f"{name}.{level.kind} does not run on vLLM's V2 runner, which takes the kinds "
            f"{', '.join(KINDS)}: {_USE_V1}."
        )
    exits = level.kind in ("early_exit", "exit_head")
    if exits and target_config.architecture not in EXIT_ARCHITECTURES:
        raise UserError(
            f"{name}.{level.kind} needs a Llama-like target ({', '.join(EXIT_ARCHITECTURES)}), "
            f"not {target_config.architecture}: use another kind of level."
        )
    layers = target_config.hf_text_config.num_hidden_layers
    if level.kind == "early_exit" and level.early_exit >= layers:
        raise UserError(
            f"{name}.early_exit is {level.early_exit}, but the target has {layers} layers: "
            "lower it."
        )


def _model_config(name: str, level, length: int, target, parallel) -> SpeculativeConfig:
    try:
        parsed = SpeculativeConfig(
            method="draft_model",
            model=level.model,
            num_speculative_tokens=length,
            target_model_config=target,
            target_parallel_config=parallel,
            **level.model_keys,
        )
    except ValidationError as error:
        raise UserError(f"{name}: {refusal(error)}") from error
    drafter = parsed.draft_model_config
    if drafter.get_vocab_size() != target.get_vocab_size():
        raise UserError(
            f"{name}.model {quoted(level.model)} has a vocabulary of {drafter.get_vocab_size()}, "
            f"the target one of {target.get_vocab_size()}: use a model of the target's family."
        )
    if drafter.max_model_len < target.max_model_len:
        raise UserError(
            f"{name}.model reads {drafter.max_model_len} tokens, fewer than max_model_len "
            f"({target.max_model_len}), which V2's cascades cannot do: lower max_model_len or "
            f"{_USE_V1}."
        )
    return parsed
