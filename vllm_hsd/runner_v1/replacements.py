"""Replacements of vLLM's functions, apart from those of the metrics.

Importing this module imports nothing of vLLM: the plugin does so in processes that never use it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_hsd.errors import UserError
from vllm_hsd.runner_v1 import hooks
from vllm_hsd.runner_v1.hooks import replaces, replaces_on_runner

if TYPE_CHECKING:
    from vllm_hsd.runner_v1.proposer import CascadeProposer

logger = logging.getLogger(__name__)

ENTRANCE = "vllm.engine.arg_utils.EngineArgs.create_speculative_config"

# Drafters of vLLM's V1 runner under which block verification was tested.
STOCK_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp", "ngram", "suffix")

_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_NO_PLUGIN_API = "vLLM has a plugin interface for drafters that run models on the V1 runner"


@replaces(
    ENTRANCE,
    ("self", "target_model_config", "target_parallel_config"),
    why="reads method 'hsd' and rejection_sample_method; LLM() and `vllm serve` both call it",
    until="vLLM lets a plugin register a speculative method",
)
def create_speculative_config(original, self, target_model_config, target_parallel_config):
    if not _may_be_ours(self):
        return original(self, target_model_config, target_parallel_config)
    raw = _speculative_keys(self)
    verifier = raw.get("rejection_sample_method")
    if raw.get("method") == "hsd":
        _prepare("method 'hsd'")
        from vllm_hsd.runner_v1.spec_config import HsdSpeculativeConfig

        parsed = HsdSpeculativeConfig.create(raw, target_model_config, target_parallel_config)
        _check_adapters(self, parsed)
        return parsed
    if verifier == "hierarchical":
        _prepare("rejection_sample_method 'hierarchical'")
        from vllm_hsd.runner_v1.stock_config import V1BlockVerificationConfig

        return V1BlockVerificationConfig.create(raw, target_model_config, target_parallel_config)
    parsed = original(self, target_model_config, target_parallel_config)
    if verifier == "block":
        _serve_block_verification(parsed)
    return parsed


def _may_be_ours(arguments) -> bool:
    """Whether the engine's arguments mention this package, or are no configuration at all."""
    given = arguments.speculative_config
    if given is None or isinstance(given, Mapping):
        mentioned = [arguments.spec_method, *(given or {}).values()]
        return any(name in mentioned for name in ("hsd", "hierarchical", "block"))
    return True


def _speculative_keys(arguments) -> dict[str, Any]:
    """Speculative configuration of the engine's arguments, spelled with underscores.

    Raises:
        UserError: it is not a mapping, or gives a key twice.
    """
    from vllm_hsd.config import read_speculative_config

    raw = read_speculative_config(arguments.speculative_config)
    flags = {
        "method": ("--spec-method", arguments.spec_method),
        "model": ("--spec-model", arguments.spec_model),
        "num_speculative_tokens": ("--spec-tokens", arguments.spec_tokens),
    }
    for key, (flag, value) in flags.items():
        if value is not None and key in raw:
            raise UserError(f"{flag} and the key {key} of speculative_config exclude each other.")
        if value is not None:
            raw[key] = value
    return raw


def _prepare(feature: str) -> None:
    """Replace the rest of vLLM's names for a feature that needs the V1 runner.

    Raises:
        UserError: the installed vLLM differs from the tested ones, or V2 is enforced.
    """
    import vllm.envs as envs

    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise UserError(
            f"VLLM_USE_V2_MODEL_RUNNER is 1, but {feature} needs vLLM's V1 runner: unset it."
        )
    hooks.install()
    if hooks.installed_release() not in hooks.TESTED:
        logger.warning(
            "vllm-hsd was tested with vLLM %s; vLLM %s has the same names, but was not run.",
            ", ".join(hooks.TESTED),
            hooks.installed_release(),
        )


def _check_adapters(arguments, parsed) -> None:
    exits = [
        i for i, level in enumerate(parsed.hsd.levels) if level.kind in ("early_exit", "exit_head")
    ]
    if arguments.enable_lora and exits:
        level = parsed.hsd.levels[exits[0]]
        raise UserError(
            f"levels[{exits[0]}].{level.kind} runs layers of the target, which does not work "
            "with LoRA adapters: remove the level or enable_lora."
        )


def _serve_block_verification(config) -> None:
    """Let the V1 runner verify blocks where it would run; V2 has block verification of its own."""
    if config.method not in STOCK_METHODS:
        return
    try:
        hooks.install()
    except UserError as error:
        logger.warning("rejection_sample_method 'block' is left to vLLM: %s", error)
        return
    from vllm_hsd.runner_v1.stock_config import BlockVerificationConfig

    # vLLM's own object, of a class whose arrival in another process installs the hooks there.
    config.__class__ = BlockVerificationConfig


@replaces(
    "vllm.config.vllm.VllmConfig._get_v2_model_runner_unsupported_features",
    ("self",),
    why="keeps method 'hsd' and rejection_sample_method 'hierarchical' on the V1 runner",
    until="cascades run on the V2 runner",
)
def unsupported_features_of_v2(original, self):
    from vllm_hsd.runner_v1.stock_config import V1BlockVerificationConfig

    features = original(self)
    if _is_cascade(self.speculative_config):
        features.append("speculative method 'hsd'")
    elif isinstance(self.speculative_config, V1BlockVerificationConfig):
        features.append("rejection_sample_method 'hierarchical'")
    return features


@replaces(
    "vllm.sampling_params.SamplingParams._validate_spec_decode",
    ("self", "speculative_config"),
    why="allows min_p and logit_bias, which our sampler applies to every draft token",
    until="vLLM's rejection sampler applies both",
)
def validate_spec_decode(original, self, speculative_config):
    if _is_cascade(speculative_config) and (self.min_p or self.logit_bias):
        self = copy.copy(self)
        self.min_p, self.logit_bias = 0.0, None
    original(self, speculative_config)


@replaces(
    "vllm.v1.spec_decode.draft_model.DraftModelProposer.__new__",
    None,
    why="makes the cascade where the runner makes its draft model; the subclass passes the "
    "runner's isinstance checks, a factory would not",
    until=_NO_PLUGIN_API,
)
def new_draft_model_proposer(original, cls, vllm_config, *args, **kwargs):
    if cls.__name__ == "DraftModelProposer" and _is_cascade(vllm_config.speculative_config):
        from vllm_hsd.runner_v1.proposer import CascadeProposer

        cls = CascadeProposer
    return _new(original, cls, vllm_config, *args, **kwargs)


@replaces(
    "vllm.v1.sample.rejection_sampler.RejectionSampler.__new__",
    None,
    why="makes our sampler for block verification on the V1 runner, which has none",
    until="vLLM's V1 runner is gone",
)
def new_rejection_sampler(original, cls, sampler, spec_config=None, *args, **kwargs):
    if cls.__name__ == "RejectionSampler" and _verifies_blocks(spec_config):
        from vllm_hsd.runner_v1.stock_drafters import StockDraftSampler

        cls = StockDraftSampler
    return _new(original, cls, sampler, spec_config, *args, **kwargs)


@replaces(
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.__init__",
    ("self", "vllm_config", "device", "pass_hidden_states_to_model", "runner"),
    why="keeps a drafter's probabilities for block verification; vLLM keeps them for 'standard'",
    until="vLLM's V1 runner is gone",
)
def init_base_proposer(original, self, vllm_config, *args, **kwargs):
    original(self, vllm_config, *args, **kwargs)
    config = vllm_config.speculative_config
    if _verifies_blocks(config) and config.draft_sample_method == "probabilistic":
        self._enable_probabilistic_draft_probs = True


def _new(original, cls, *args, **kwargs):
    return original(cls) if original is object.__new__ else original(cls, *args, **kwargs)


def _is_cascade(config) -> bool:
    return getattr(config, "method", None) == "hsd"


def _verifies_blocks(config) -> bool:
    return (
        getattr(config, "rejection_sample_method", None) == "block"
        and config.method in STOCK_METHODS
    )


@replaces_on_runner(
    f"{_RUNNER}._update_states",
    ("self", "scheduler_output"),
    why="tells of requests that join, leave or come back, also in steps without tokens",
    until=_NO_PLUGIN_API,
)
def update_states(original, proposer: CascadeProposer, scheduler_output):
    deferred = original(scheduler_output)
    proposer.follow_scheduler(scheduler_output)
    return deferred


@replaces_on_runner(
    f"{_RUNNER}.sample_tokens",
    ("self", "grammar_output"),
    why="attaches the counts of every level to the step's output",
    until="vLLM carries a drafter's own statistics",
)
def sample_tokens(original, proposer: CascadeProposer, grammar_output):
    from vllm.v1.outputs import ModelRunnerOutput

    output = original(grammar_output)
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        stats = proposer.take_stats()
        if proposer.device.type != "cpu":
            for level in stats:
                # A device runs behind the host's clock: this is the time to enqueue the work.
                level.forward_seconds = 0.0
        # A plain attribute: pickled to the scheduler with the output, unknown to vLLM.
        output.hsd_level_stats = stats  # type: ignore[attr-defined]
    return output


@replaces_on_runner(
    f"{_RUNNER}.propose_draft_token_ids",
    (
        "self",
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
    why="drafts with the cascade",
    until=_NO_PLUGIN_API,
)
def propose_draft_token_ids(original, proposer: CascadeProposer, *args, **kwargs):
    return proposer.propose_draft_token_ids(*args, **kwargs)


@replaces_on_runner(
    f"{_RUNNER}._input_fits_in_drafter",
    ("self", "common_attn_metadata"),
    why="drafts up to max_model_len with a limit per request; vLLM stops the whole batch",
    until=_NO_PLUGIN_API,
)
def input_fits_in_drafter(original, proposer: CascadeProposer, metadata):
    return metadata is not None


@replaces_on_runner(
    f"{_RUNNER}._get_spec_decode_draft_probs",
    ("self", "spec_decode_metadata"),
    why="leaves the draft probabilities with the drafts; vLLM drops the batch's where one has none",
    until=_NO_PLUGIN_API,
)
def no_draft_probs(original, proposer: CascadeProposer, metadata):
    return None


def take_over_runner(proposer: CascadeProposer, runner) -> None:
    """Replace the runner's methods that know only one drafter."""
    # vLLM is about to warn that min_p and logit_bias do nothing: see complete_logits_processors.
    logging.getLogger("vllm.v1.sample.logits_processor").addFilter(
        lambda record: "min_p and logit_bias" not in str(record.msg)
    )
    hooks.install_on_runner(runner, proposer)


def complete_logits_processors(runner) -> None:
    """Add the built-in logits processors that vLLM leaves out under speculation.

    Done on the finished runner, so that it does not matter who has built the list or wrapped the
    function that does.

    Raises:
        UserError: the list holds a processor that our sampler would not apply.
    """
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS

    present = runner.input_batch.logitsprocs
    known = tuple(BUILTIN_LOGITS_PROCESSORS)
    for processor in present.all:
        if not isinstance(processor, known):
            name = f"{type(processor).__module__}.{type(processor).__qualname__}"
            raise UserError(
                f"method 'hsd' does not apply the logits processor {name}: remove it, or serve "
                "without speculation."
            )
    from vllm.utils.platform_utils import is_pin_memory_available

    for kind in known:
        if not any(isinstance(processor, kind) for processor in present.all):
            processor = kind(runner.vllm_config, runner.device, is_pin_memory_available())
            (
                present.argmax_invariant
                if processor.is_argmax_invariant()
                else present.non_argmax_invariant
            ).append(processor)
