"""Names of vLLM that this package overrides in subclasses, reads or calls (see hooks.py).

Names that are imported are not listed: `Registry.faults` reports an import that fails. A test
compares this list with what the modules of `runner_v2` read from vLLM's objects.
"""

from __future__ import annotations

from vllm_hsd.runner_v2.hooks import REGISTRY

_GPU = "vllm.v1.worker.gpu"
_STANDALONE = f"{_GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator"
_REJECTION = f"{_GPU}.spec_decode.rejection_sampler.RejectionSampler"

# name -> (why, parameters)
_OVERRIDDEN: dict[str, tuple[str, tuple[str, ...] | None]] = {
    f"{_REJECTION}.__init__": (
        "is called by ours",
        ("self", "sampler", "spec_config", "device", "watermark_key"),
    ),
    f"{_REJECTION}.__call__": (
        "verifies the draft token that a grammar refuses",
        ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
    ),
    f"{_REJECTION}._verify": (
        "verifies blocks of draft tokens",
        (
            "self",
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        ),
    ),
}

_MANAGER = f"{_GPU}.cudagraph_utils.CudaGraphManager"

_OVERRIDDEN |= {
    f"{_MANAGER}.__init__": (
        "is called by ours",
        (
            "self",
            "vllm_config",
            "device",
            "cudagraph_mode",
            "decode_query_len",
            "lora_capture_cases",
            "varlen_decode",
            "ubatch_runner",
        ),
    ),
    f"{_MANAGER}._init_candidates": ("batch sizes of proposals", ("self",)),
    f"{_STANDALONE}.init_cudagraph_manager": (
        "chooses the batch sizes of proposals",
        ("self", "cudagraph_mode"),
    ),
    f"{_STANDALONE}.capture": ("captures proposals", ("self",)),
    f"{_GPU}.spec_decode.speculator.DraftModelSpeculator.__init__": (
        "is called by the cascade",
        ("self", "vllm_config", "device"),
    ),
    f"{_GPU}.spec_decode.speculator.DraftModelSpeculator.set_attn": (
        "makes attention metadata builders per level",
        (
            "self",
            "model_state",
            "kv_cache_config",
            "block_tables",
            "target_input_buffers",
            "target_attn_groups",
        ),
    ),
    f"{_STANDALONE}.load_draft_model": (
        "loads every level",
        ("self", "target_model", "target_attn_layer_names"),
    ),
    f"{_STANDALONE}.propose": (
        "runs the cascade",
        (
            "self",
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "num_sampled",
            "num_rejected",
            "last_sampled",
            "next_prefill_tokens",
            "temperature",
            "seeds",
            "dp_sync_state",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "mm_inputs",
            "is_profile",
            "num_speculative_tokens",
        ),
    ),
}

# class -> {attribute: why}
_READ: dict[str, dict[str, str]] = {
    f"{_GPU}.model_runner.GPUModelRunner": {
        "sampler": "sampling parameters of the requests",
        "rejection_sampler": "replaced by ours",
        "speculator": "the drafter",
        "speculative_config": "the configuration",
        "req_states": "table of requests",
        "batch_sharder": "refused",
        "vocab_size": "compared with the drafter's",
        "device": "device of the models",
    },
    f"{_GPU}.sample.sampler.Sampler": {
        "sampling_states": "sampling parameters",
        "needs_logits_processing": "requests that need more than a temperature",
        "apply_sampling_params": "applies all other sampling parameters",
        "logprobs_mode": "log-probabilities before or after the sampling parameters",
        "req_states": "table of requests",
    },
    f"{_GPU}.sample.states.SamplingStates": {
        "temperature": "sampling parameter",
        "min_p": "sampling parameter",
        "top_k": "sampling parameter",
        "top_p": "sampling parameter",
        "seeds": "seeds of the requests",
        "vocab_size": "top_k of a request that has none",
    },
    "vllm.v1.core.sched.scheduler.Scheduler": {
        "vllm_config": "whether its draft lengths are learned",
        "dynamic_sd_lookup": "draft lengths by batch size",
        "running": "requests that must repeat",
    },
    "vllm.v1.core.sched.output.SchedulerOutput": {
        "num_scheduled_tokens": "requests of a step, and which of them read prompts",
        "scheduled_spec_decode_tokens": "drafts that a step verifies",
        "num_spec_tokens_to_schedule": "whether a step drafts",
        "scheduled_new_reqs": "whether a step reads prompts",
    },
    "vllm.v1.outputs.ModelRunnerOutput": {"sampled_token_ids": "tokens that a step emits"},
    "vllm.v1.request.Request": {"sampling_params": "whether a request must repeat"},
    "vllm.sampling_params.SamplingParams": {"sampling_type": "whether a request must repeat"},
    f"{_GPU}.states.RequestState": {
        "total_len": "tokens of a request, the key of its uniforms",
        "all_token_ids": "text of a request",
    },
    _MANAGER: {
        "_capture_descs": "what is captured",
        "capture": "captures it",
        "graphs": "what was captured",
        "run_fullgraph": "replays it",
    },
    "vllm.v1.worker.utils.AttentionGroup": {
        "backend": "named where it cannot be captured",
        "kv_cache_spec": "asks whether it can be captured",
        "kv_cache_group_id": "block tables of the group",
        "get_metadata_builder": "asks whether it can be captured",
        "map_to_kernel_block_table": "maps the block tables of a batch before a replay",
        "supports_draft_decode_metadata_update": "asks whether it can be captured",
        "update_draft_decode_metadata": "plans the work of a forward pass inside a graph",
    },
    "vllm.v1.attention.backend.AttentionMetadataBuilder": {
        "get_cudagraph_support": "asks whether it can be captured",
    },
    "vllm.config.compilation.CompilationConfig": {
        "max_cudagraph_capture_size": "most tokens that attention kernels are captured for",
    },
    f"{_GPU}.block_table.BlockTables": {
        "block_table_ptrs": "tables of all requests",
        "block_table_strides": "tables of all requests",
        "block_sizes_tensor": "slots per block",
        "input_block_tables": "tables of the batch, for attention",
        "num_kv_cache_groups": "tables per request",
    },
    f"{_GPU}.input_batch.InputBatch": {
        "num_reqs": "size of the batch",
        "idx_mapping": "slots of the batch",
        "has_prefill": "prompts to ingest",
        "num_tokens_after_padding": "tokens to ingest",
        "input_ids": "tokens to ingest",
        "positions": "tokens to ingest",
        "seq_lens_cpu_upper_bound": "longest texts, for attention",
    },
    f"{_GPU}.spec_decode.speculator.DraftModelSpeculator": {
        "draft_logits": "rows that the draft tokens were drawn from",
        "compute_draft_logits": "the drafter's logits",
        "vllm_config": "configuration of the levels",
        "speculative_config": "the cascade",
        "device": "device of the levels",
        "dtype": "type of the rows",
        "vocab_size": "length of the rows",
        "max_num_reqs": "slots",
        "max_model_len": "longest text",
        "draft_tokens": "where the runner finds drafts",
        "attn_groups": "groups whose caches vLLM maps to kernel blocks",
        "block_tables": "places in the cache",
        "kv_cache_config": "groups of the levels' layers",
    },
    "vllm.config.speculative.SpeculativeConfig": {
        "num_speculative_tokens": "longest draft",
        "enable_adaptive_verification": "refused",
    },
}

REGISTRY.depends_on(_OVERRIDDEN, _READ)
