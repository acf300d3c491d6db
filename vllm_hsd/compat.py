"""The vLLM names that this package replaces or relies on, and the check that they are as tested.

Every replaced name stands in `HOOKS` with the reason and the parameters it had in the releases of
`TESTED`. `faults` compares them with the vLLM that is installed: method "hsd" refuses to start
where they differ, all other uses of vLLM stay as they are.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass

TESTED = ("0.32",)
# Every hook has the same parameters there, but nothing was run.
COMPARED = ("0.33",)


@dataclass(frozen=True)
class Hook:
    """A name of vLLM that we replace (or subclass), and what it must look like.

    Attributes:
        name: module and attribute path.
        why: what the replacement does for method "hsd".
        parameters: names of its parameters, in order.
        place: "class" replaced in its class or module at registration, "runner" on one runner
            instance of a worker, "subclass" overridden in a class of ours, "late" imported when a
            level needs it (numba, once loaded, breaks vLLM 0.32's import of Triton kernels).
    """

    name: str
    why: str
    parameters: tuple[str, ...]
    place: str = "class"


_RUNNER = "vllm.v1.worker.gpu_model_runner"
_PROPOSER = "vllm.v1.spec_decode.draft_model.DraftModelProposer"
_METRICS = "vllm.v1.spec_decode.metrics"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"

HOOKS = (
    Hook(
        "vllm.engine.arg_utils.EngineArgs.create_speculative_config",
        "reads method 'hsd'; LLM() and `vllm serve` both pass here",
        ("self", "target_model_config", "target_parallel_config"),
    ),
    Hook(
        "vllm.config.vllm.VllmConfig._get_v2_model_runner_unsupported_features",
        "keeps a cascade on the V1 runner",
        ("self",),
    ),
    Hook(
        "vllm.sampling_params.SamplingParams._validate_spec_decode",
        "allows min_p and logit_bias, which our sampler applies to every row",
        ("self", "speculative_config"),
    ),
    Hook(
        f"{_PROPOSER}.__init__",
        "__new__ hands out the cascade where the runner builds its draft model",
        ("self", "vllm_config", "device", "runner"),
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler.RejectionSampler.__init__",
        "__new__ hands out our sampler for rejection_sample_method 'hierarchical'",
        ("self", "sampler", "spec_config", "device"),
    ),
    Hook(
        f"{_SCHEDULER}.update_from_output",
        "keeps the per-level counts that come with a step's output",
        ("self", "scheduler_output", "model_runner_output"),
    ),
    Hook(
        f"{_SCHEDULER}.make_stats",
        "adds the per-level counts to the statistics of the step",
        (
            "self",
            "spec_decoding_stats",
            "kv_connector_stats",
            "cudagraph_stats",
            "perf_stats",
            "ec_connector_stats",
        ),
    ),
    Hook(
        f"{_METRICS}.SpecDecodingLogging.observe",
        "gathers the per-level counts for the log line",
        ("self", "spec_decoding_stats"),
    ),
    Hook(
        f"{_METRICS}.SpecDecodingLogging.log",
        "prints the per-level counts after vLLM's own line",
        ("self", "log_fn"),
    ),
    Hook(
        f"{_METRICS}.SpecDecodingProm.observe",
        "counts per level for /metrics",
        ("self", "spec_decoding_stats", "engine_idx"),
    ),
    Hook(
        f"{_RUNNER}.build_logitsprocs",
        "builds min_p and logit_bias beside min_tokens",
        ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs"),
        "runner",
    ),
    Hook(
        f"{_RUNNER}.GPUModelRunner._update_states",
        "follows requests that join, leave or come back",
        ("self", "scheduler_output"),
        "runner",
    ),
    Hook(
        f"{_RUNNER}.GPUModelRunner.sample_tokens",
        "attaches the per-level counts to the step's output",
        ("self", "grammar_output"),
        "runner",
    ),
    Hook(
        f"{_RUNNER}.GPUModelRunner.propose_draft_token_ids",
        "drafts with the cascade",
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
        "runner",
    ),
    Hook(
        f"{_RUNNER}.GPUModelRunner._input_fits_in_drafter",
        "drafts up to max_model_len, capped per request",
        ("self", "common_attn_metadata"),
        "runner",
    ),
    Hook(
        f"{_RUNNER}.GPUModelRunner._get_spec_decode_draft_probs",
        "proposal rows stay with the drafts",
        ("self", "spec_decode_metadata"),
        "runner",
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler.RejectionSampler.forward",
        "verifies losslessly at sequence level",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
        "subclass",
    ),
    Hook(
        "vllm.v1.sample.rejection_sampler.RejectionSampler._get_logprobs_tensors",
        "is called for log-probabilities",
        (
            "self",
            "max_num_logprobs",
            "metadata",
            "logits",
            "target_logits",
            "bonus_logits",
            "sampled_token_ids",
        ),
        "subclass",
    ),
    Hook(
        "vllm.v1.spec_decode.ngram_proposer._find_longest_matched_ngram_and_propose_tokens",
        "is called by ngram levels",
        ("origin_tokens", "min_ngram", "max_ngram", "max_model_len", "k"),
        "late",
    ),
    Hook(
        f"{_PROPOSER}._create_draft_vllm_config",
        "is called once per level",
        ("self",),
        "subclass",
    ),
    Hook(
        f"{_PROPOSER}.initialize_attn_backend",
        "builds attention metadata per level",
        ("self", "kv_cache_config", "kernel_block_sizes"),
        "subclass",
    ),
    Hook(
        f"{_PROPOSER}.dummy_run",
        "runs every level for memory profiling",
        ("self", "num_tokens", "use_cudagraphs", "is_graph_capturing", "slot_mappings"),
        "subclass",
    ),
)


def resolve(name: str):
    """The object behind a dotted name of module and attributes.

    Raises:
        AttributeError or ImportError: it is not there.
    """
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module in '{name}'")


def hook_fault(hook: Hook) -> str | None:
    """One sentence on how a hook differs from the tested releases, None if it does not."""
    try:
        found = inspect.unwrap(resolve(hook.name))
    except (ImportError, AttributeError) as error:
        return f"{hook.name} is not there ({error})"
    parameters = tuple(inspect.signature(found).parameters)
    if parameters != hook.parameters:
        return f"{hook.name} takes ({', '.join(parameters)}), not ({', '.join(hook.parameters)})"
    return None


def installed_release() -> str:
    """The installed vLLM as "major.minor"."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def version_fault() -> str | None:
    """One sentence when the installed vLLM is of an unknown release, None otherwise."""
    release = installed_release()
    if release in (*TESTED, *COMPARED):
        return None
    known = ", ".join(f"{known}.*" for known in (*TESTED, *COMPARED))
    return f"vLLM {release} is not supported by this version of vllm-hsd: install one of {known}."


def faults() -> list[str]:
    """Everything that keeps method 'hsd' from running on the installed vLLM."""
    version = version_fault()
    early = [hook for hook in HOOKS if hook.place != "late"]
    differing = [fault for hook in early if (fault := hook_fault(hook)) is not None]
    return ([version] if version else []) + differing
