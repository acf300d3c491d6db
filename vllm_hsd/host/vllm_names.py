"""Names of vLLM that classes of `host` override (see `Registry.overrides`)."""

from __future__ import annotations

from vllm_hsd.host.hooks import REGISTRY

_GPU = "vllm.v1.worker.gpu"
_STANDALONE = f"{_GPU}.spec_decode.standalone_ar.speculator.StandaloneARSpeculator"
_HEAD = f"{_GPU}.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator"
_MANAGER = f"{_GPU}.cudagraph_utils.CudaGraphManager"
_REJECTION = f"{_GPU}.spec_decode.rejection_sampler.RejectionSampler"
_ESTIMATOR = f"{_GPU}.spec_decode.acceptance_estimator.OnlineAcceptanceEstimator"
_PROPOSE = (
    "self input_batch attn_metadata slot_mappings last_hidden_states "
    "aux_hidden_states num_sampled num_rejected last_sampled next_prefill_tokens "
    "temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs "
    "is_profile num_speculative_tokens"
)

REGISTRY.overrides(
    {
        f"{_REJECTION}.__init__": (
            "is called by ours",
            "self sampler spec_config device watermark_key",
        ),
        f"{_REJECTION}.__call__": (
            "verifies the draft token that a grammar refuses",
            "self logits input_batch draft_logits invalid_drafts",
        ),
        f"{_REJECTION}._verify": (
            "verifies blocks of draft tokens",
            (
                "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping "
                "idx_mapping_np expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np "
                "verify_draft_sampled"
            ),
        ),
        f"{_REJECTION}._get_logprobs_tensors": (
            "answers `logprob_token_ids` under speculation",
            "self sampled num_sampled logits cu_num_logits cu_num_logits_np max_num_logprobs",
        ),
        f"{_ESTIMATOR}.predict": (
            "is called by ours, which stands in its place",
            "self logits idx_mapping draft_step confidence_probs temperature",
        ),
        f"{_ESTIMATOR}.step": (
            "is called by ours, which stands in its place",
            "self idx_mapping num_sampled num_rejected",
        ),
        f"{_MANAGER}.__init__": (
            "is called by ours",
            (
                "self vllm_config device cudagraph_mode decode_query_len lora_capture_cases "
                "varlen_decode ubatch_runner"
            ),
        ),
        f"{_MANAGER}._init_candidates": ("batch sizes of proposals", "self"),
        f"{_STANDALONE}.init_cudagraph_manager": (
            "chooses the batch sizes of proposals",
            "self cudagraph_mode",
        ),
        f"{_STANDALONE}.capture": ("captures proposals", "self"),
        f"{_GPU}.spec_decode.speculator.DraftModelSpeculator.__init__": (
            "is called by the cascade",
            "self vllm_config device",
        ),
        f"{_GPU}.spec_decode.speculator.DraftModelSpeculator.set_attn": (
            "makes attention metadata builders per level",
            (
                "self model_state kv_cache_config block_tables target_input_buffers "
                "target_attn_groups"
            ),
        ),
        f"{_STANDALONE}.load_draft_model": (
            "loads every level",
            "self target_model target_attn_layer_names",
        ),
        f"{_STANDALONE}.propose": ("runs the cascade", _PROPOSE),
        f"{_HEAD}.propose": ("puts a lookup's offer in the place of a head's draft", _PROPOSE),
        "vllm.v1.spec_decode.metrics.SpecDecodingStats.observe_draft": (
            "tokens of branches have no places of their own",
            "self num_draft_tokens num_accepted_tokens",
        ),
        "vllm.model_executor.custom_op.CustomOp.forward": (
            "calls `_forward_method`, which an early exit sets while it runs",
            "self args kwargs",
        ),
    }
)
