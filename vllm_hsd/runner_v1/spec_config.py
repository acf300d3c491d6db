"""`SpeculativeConfig` for method "hsd": ours outside, one of vLLM's own per level inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, SkipValidation
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config
from vllm.tokenizers.registry import get_tokenizer
from vllm.utils.hashing import safe_hash

from vllm_hsd.config import CascadeConfig, ConfigError, LevelConfig
from vllm_hsd.runner_v1.level_kinds import check_exit_order, check_level_kind


@config
class HsdSpeculativeConfig(SpeculativeConfig):
    """What vLLM carries around for a cascade; build it with `create`."""

    method: str | None = None
    """Widens vLLM's closed list of methods."""
    hsd: SkipValidation[Any] = None
    """The parsed `CascadeConfig`."""
    level_configs: SkipValidation[list] = Field(default_factory=list)
    """One stock `SpeculativeConfig(method="draft_model")` per level, None where no model loads."""

    @classmethod
    def create(cls, raw: dict, target_model_config, target_parallel_config):
        """Check the user's keys and build the configuration.

        Raises:
            ConfigError: one sentence that names the key and the fix.
        """
        hsd = CascadeConfig.parse({key: value for key, value in raw.items() if key != "method"})
        _check_target(target_model_config, target_parallel_config)
        levels = []
        for i, (level, budget) in enumerate(zip(hsd.levels, hsd.draft_lengths, strict=True)):
            name = f"levels[{i}]"
            if level.kind == "model":
                levels.append(
                    _level_config(name, level, budget, target_model_config, target_parallel_config)
                )
            else:
                check_level_kind(name, level, target_model_config)
                levels.append(None)
        check_exit_order(hsd.levels)
        return cls(
            method="hsd",
            hsd=hsd,
            level_configs=levels,
            num_speculative_tokens=hsd.num_speculative_tokens,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )

    def __post_init__(self) -> None:
        # Code of vLLM that knows one drafter sees the highest level that is a model of its own.
        models = [level for level in self.level_configs if level is not None]
        self.draft_model_config = self.target_model_config
        self.draft_parallel_config = self.target_parallel_config
        if models:
            self.draft_model_config = models[-1].draft_model_config
            self.draft_parallel_config = models[-1].draft_parallel_config
        self.model = self.draft_model_config.model
        self.draft_tensor_parallel_size = self.target_parallel_config.tensor_parallel_size
        self.prompt_lookup_max = self.prompt_lookup_min = 0
        self.draft_sample_method = "probabilistic"
        # The cascade works on sampled tokens on the host: after bookkeeping, without async
        # scheduling.
        self.disable_padded_drafter_batch = True

    def uses_draft_model(self) -> bool:
        return True

    def uses_draft_kv_cache(self) -> bool:
        return True

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        return 1

    def compute_hash(self) -> str:
        models = [level.compute_hash() for level in self.level_configs if level is not None]
        return safe_hash(
            str(("hsd", models, self.hsd.model_dump_json())).encode(), usedforsecurity=False
        ).hexdigest()

    def __repr__(self) -> str:
        names = [getattr(level, level.kind) for level in self.hsd.levels]
        return (
            f"SpeculativeConfig(method='hsd', levels={names}, "
            f"num_spec_tokens={self.num_speculative_tokens}, verifier={self.hsd.verifier!r})"
        )


def _check_target(model_config, parallel_config) -> None:
    if parallel_config.pipeline_parallel_size > 1 or parallel_config.data_parallel_size > 1:
        raise ConfigError(
            "method 'hsd' runs with tensor parallelism only: set pipeline_parallel_size and "
            "data_parallel_size to 1."
        )
    if model_config.is_hybrid or model_config.is_attention_free:
        raise ConfigError(
            f"method 'hsd' cannot take back rejected tokens of the target '{model_config.model}', "
            "which keeps recurrent state: use an attention-only target."
        )
    if model_config.uses_mrope:
        raise ConfigError(
            f"method 'hsd' does not serve targets with multi-dimensional positions (M-RoPE) such "
            f"as '{model_config.model}': use a text-only target."
        )


def _level_config(
    name: str, level: LevelConfig, budget: int, target_model_config, target_parallel_config
) -> SpeculativeConfig:
    """vLLM's own configuration of one drafter, which parses the per-model keys."""
    path = Path(level.model).expanduser()
    looks_local = path.is_absolute() or level.model.startswith((".", "~"))
    if looks_local and not path.is_dir():
        raise ConfigError(
            f"{name}.model: no directory '{level.model}'; give a model's path or name."
        )
    tp = target_parallel_config.tensor_parallel_size
    if level.model_keys.get("draft_tensor_parallel_size", tp) != tp:
        raise ConfigError(
            f"{name}.draft_tensor_parallel_size is "
            f"{level.model_keys['draft_tensor_parallel_size']} and the target's "
            f"tensor_parallel_size {tp}: they must be equal, leave the key out."
        )
    try:
        parsed = _StockDraft(
            method="draft_model",
            model=level.model,
            num_speculative_tokens=budget,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
            **level.model_keys,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{name} ('{level.model}') cannot be loaded as a drafter: {reason}"
        ) from error
    _check_level(name, level.model, parsed.draft_model_config, target_model_config)
    return parsed


@config
class _StockDraft(SpeculativeConfig):
    """vLLM's configuration of one draft model; its vocabulary is checked by `_check_level`."""

    def verify_equal_vocab_size_if_draft_model(self) -> None:
        """Our own message names the level and explains padded vocabularies."""


def _check_level(name: str, model: str, draft_config, target_config) -> None:
    if draft_config.is_hybrid or draft_config.is_attention_free:
        raise ConfigError(
            f"{name}.model '{model}' keeps recurrent state and cannot take back rejected tokens: "
            "use an attention-only drafter."
        )
    theirs, ours = target_config.get_vocab_size(), draft_config.get_vocab_size()
    if theirs != ours:
        padded = ""
        if abs(theirs - ours) < 1024 and max(theirs, ours) > 16 * 1024:
            padded = (
                " (sizes this close, like Qwen's 151936 and 152064, often mean one tokenizer with "
                "embeddings padded differently, but rows of different width cannot be compared)"
            )
        raise ConfigError(
            f"{name}.model '{model}' has a vocabulary of {ours} tokens and the target "
            f"'{target_config.model}' one of {theirs}{padded}: use a drafter whose config.json has "
            f"vocab_size {theirs}."
        )
    if target_config.skip_tokenizer_init:
        return
    try:
        drafts = get_tokenizer(model, trust_remote_code=draft_config.trust_remote_code)
    except (OSError, ValueError):
        return  # A drafter may come without tokenizer files: it only ever sees token ids.
    targets = get_tokenizer(
        target_config.tokenizer, trust_remote_code=target_config.trust_remote_code
    )
    if drafts.get_vocab() != targets.get_vocab():
        raise ConfigError(
            f"{name}.model '{model}' has {ours} tokens like the target, but its tokenizer gives "
            f"them other meanings than '{target_config.tokenizer}': use a drafter with the "
            "target's tokenizer."
        )
