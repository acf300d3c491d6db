"""Names of vLLM that configurations on both runners override, read or call (see registry.py).

A test compares this list with what the modules read from vLLM's objects.
"""

from __future__ import annotations

_SPECULATION = "vllm.config.speculative.SpeculativeConfig"

# name -> (why, parameters)
OVERRIDDEN: dict[str, tuple[str, tuple[str, ...] | None]] = {
    f"{_SPECULATION}.max_num_new_slots_for_drafting": ("slots of the drafts", None),
    f"{_SPECULATION}.compute_hash": ("tells compiled cascades apart", ("self",)),
    f"{_SPECULATION}.verify_equal_vocab_size_if_draft_model": (
        "names the level whose vocabulary differs",
        ("self",),
    ),
}

# class -> {attribute: why}
READ: dict[str, dict[str, str]] = {
    _SPECULATION: {
        "method": "the drafter",
        "draft_model_config": "a level's model; the runner reads the layers of a head's states",
        "rejection_sample_method": "block verification",
    },
    "vllm.config.model.ModelConfig": {
        "model": "name in messages",
        "architecture": "targets that early exits know",
        "max_model_len": "longest request of a model",
        "tokenizer": "compared with a drafter's",
        "skip_tokenizer_init": "whether there is a tokenizer to compare",
        "trust_remote_code": "loads a drafter's tokenizer",
        "hf_text_config": "number of layers",
        "hf_config": "heads that draft in parallel",
        "is_hybrid": "recurrent state cannot be taken back",
        "is_attention_free": "recurrent state cannot be taken back",
        "uses_mrope": "refused",
        "is_moe": "refused with data parallelism",
        "get_vocab_size": "compared with a drafter's",
        "get_hidden_size": "compared with an exit head's",
    },
    "vllm.config.parallel.ParallelConfig": {
        "tensor_parallel_size": "shared by all levels",
        "pipeline_parallel_size": "refused above 1",
        "data_parallel_size": "refused above 1 for mixtures of experts",
        "decode_context_parallel_size": "refused above 1",
    },
    "vllm.config.vllm.VllmConfig": {
        "scheduler_config": "limits of a step; shown to configurations of the V2 runner",
        "speculative_config": "configurations of ours",
    },
    "vllm.config.scheduler.SchedulerConfig": {
        "async_scheduling": "grammars are exact with it only",
        "max_num_seqs": "slots of the request table; whether a batch can be too large for drafts",
    },
    "vllm.engine.arg_utils.EngineArgs": {
        "speculative_config": "the keys of a cascade",
        "enable_lora": "refuses early exits under adapters",
        "kv_transfer_config": "refuses levels that fill their caches late",
        "kv_offloading_size": "refuses levels that fill their caches late",
        "spec_method": "--spec-method",
        "spec_model": "--spec-model",
        "spec_tokens": "--spec-tokens",
    },
    "vllm.sampling_params.SamplingParams": {
        "min_p": "allowed under speculation",
        "logit_bias": "allowed under speculation",
        "structured_outputs": "refused where the scheduler cuts drafts by what their tokens are",
    },
}
