"""Names of vLLM that this package overrides in subclasses, reads or calls (see hooks.py).

Names that are imported are not listed: `hooks.faults` reports an import that fails. A test compares
this list with what the modules of `runner_v1` read from vLLM's objects.
"""

from __future__ import annotations

from vllm_hsd.registry import Hook, How
from vllm_hsd.runner_v1.hooks import REGISTRY

_WORKER = "vllm.v1.worker"
_SAMPLE = "vllm.v1.sample"
_SPECULATION = "vllm.config.speculative.SpeculativeConfig"
_SPECULATION_BASE = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer"
_PROPOSER = "vllm.v1.spec_decode.draft_model.DraftModelProposer"
_SAMPLER = f"{_SAMPLE}.rejection_sampler.RejectionSampler"

# name -> (why, parameters)
_OVERRIDDEN: dict[str, tuple[str, tuple[str, ...] | None]] = {
    f"{_SPECULATION}.uses_draft_model": ("gives the drafts their slots in the cache", ("self",)),
    f"{_SPECULATION}.uses_draft_kv_cache": ("counts the levels' caches", ("self",)),
    f"{_SPECULATION}.use_eagle_block_drop": (
        "recomputes the last block of a prefix for EAGLE-3 heads",
        ("self",),
    ),
    f"{_PROPOSER}.__init__": (
        "replaced by ours in the subclass",
        ("self", "vllm_config", "device", "runner"),
    ),
    f"{_PROPOSER}._create_draft_vllm_config": ("configures each level", ("self",)),
    f"{_PROPOSER}.load_model": ("loads every level", ("self", "target_model")),
    f"{_PROPOSER}.initialize_attn_backend": (
        "makes attention metadata builders per level",
        ("self", "kv_cache_config", "kernel_block_sizes"),
    ),
    f"{_PROPOSER}.initialize_cudagraph_keys": (
        "runs without CUDA graphs",
        ("self", "cudagraph_mode"),
    ),
    f"{_PROPOSER}.validate_same_kv_cache_group": (
        "allows several KV-cache groups",
        ("self", "kv_cache_config"),
    ),
    f"{_PROPOSER}.dummy_run": (
        "runs every level for memory profiling",
        ("self", "num_tokens", "use_cudagraphs", "is_graph_capturing", "slot_mappings"),
    ),
    f"{_SAMPLER}.__init__": (
        "replaced by ours in the subclass",
        ("self", "sampler", "spec_config", "device"),
    ),
    f"{_SAMPLER}.forward": (
        "verifies blocks of draft tokens",
        ("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
}

# class -> {attribute: why}
_READ: dict[str, dict[str, str]] = {
    f"{_WORKER}.gpu_model_runner.GPUModelRunner": {
        "device": "device of the levels",
        "vllm_config": "configuration of the logits processors",
        "input_batch": "requests of the step",
        "requests": "sampling parameters and seeds",
        "sampler": "log-probabilities",
        "rejection_sampler": "replaced by our sampler once the levels are loaded",
        "discard_request_mask": "prompt chunks, whose samples are thrown away",
        "use_aux_hidden_state_outputs": "set where an EAGLE-3 head reads the target's states",
        "_get_eagle3_aux_layers_from_config": "layers whose states a head reads",
    },
    f"{_WORKER}.gpu_input_batch.InputBatch": {
        "req_ids": "order of the batch",
        "req_id_to_index": "requests that are in the batch",
        "num_reqs": "size of the batch",
        "token_ids_cpu": "tokens so far; drafts are written after them",
        "num_tokens_no_spec": "accepted tokens",
        "num_computed_tokens_cpu": "tokens in the target's cache",
        "num_prompt_tokens": "limit by max_tokens",
        "temperature_cpu": "greedy requests",
        "generators": "emptied: ours move only with a token that is emitted",
        "block_table": "blocks of the KV cache, shared by all levels",
        "logitsprocs": "completed by min_p and logit_bias",
    },
    f"{_WORKER}.gpu_input_batch.CachedRequestState": {
        "sampling_params": "seed, max_tokens, end of sequence",
        "generator": "noise of seeded requests",
    },
    f"{_WORKER}.block_table.BlockTable": {
        "block_table": "blocks of each request",
        "block_size": "slots per block",
    },
    f"{_WORKER}.block_table.MultiGroupBlockTable": {"__getitem__": "table of one KV-cache group"},
    "vllm.v1.utils.CpuGpuBuffer": {"np": "host copy of a buffer"},
    f"{_WORKER}.utils.AttentionGroup": {
        "layer_names": "layers of a group",
        "kv_cache_group_id": "block table of a group",
        "kv_cache_spec": "size of a group's blocks",
        "create_metadata_builders": "makes a group's builders",
        "build_metadata_for_drafting": "makes a group's metadata",
    },
    "vllm.v1.core.sched.output.SchedulerOutput": {
        "finished_req_ids": "requests that left",
        "scheduled_new_reqs": "requests that joined",
        "scheduled_cached_reqs": "requests that came back",
        "num_scheduled_tokens": "tokens of the step",
        "total_num_scheduled_tokens": "tokens of the step",
    },
    "vllm.v1.core.sched.output.CachedRequestData": {
        "req_ids": "requests of the step",
        "resumed_req_ids": "requests that came back after preemption",
        "num_computed_tokens": "tokens in their cache",
    },
    "vllm.v1.core.sched.output.NewRequestData": {
        "req_id": "new request",
        "num_computed_tokens": "tokens in the prefix cache",
    },
    f"{_SAMPLE}.metadata.SamplingMetadata": {
        "temperature": "sampling parameter",
        "all_greedy": "sampling parameter",
        "all_random": "sampling parameter",
        "top_p": "sampling parameter",
        "top_k": "sampling parameter",
        "generators": "uniforms of seeded requests under vLLM's own drafters",
        "max_num_logprobs": "log-probabilities wanted",
        "logprob_token_ids": "tokens whose log-probabilities are wanted",
        "no_penalties": "sampling parameter",
        "prompt_token_ids": "penalties",
        "frequency_penalties": "sampling parameter",
        "presence_penalties": "sampling parameter",
        "repetition_penalties": "sampling parameter",
        "output_token_ids": "penalties, bad words",
        "allowed_token_ids_mask": "sampling parameter",
        "bad_words_token_ids": "sampling parameter",
        "logitsprocs": "min_p, logit_bias, min_tokens",
        "spec_token_ids": "thinking budget",
        "thinking_budget_state_holder": "thinking budget",
    },
    f"{_SAMPLE}.logits_processor.builtin.MinPLogitsProcessor": {
        "min_p_count": "whether a request asks for min_p",
        "min_p_cpu_tensor": "min_p of each request",
    },
    f"{_SAMPLE}.logits_processor.builtin.LogitBiasLogitsProcessor": {"biases": "logit_bias"},
    f"{_SAMPLE}.logits_processor.builtin.MinTokensLogitsProcessor": {
        "min_toks": "min_tokens",
        "apply_with_spec_decode": "min_tokens for each draft token",
    },
    f"{_SAMPLE}.logits_processor.state.LogitsProcessors": {
        "all": "processors of the batch",
        "argmax_invariant": "place of min_p",
        "non_argmax_invariant": "place of logit_bias and min_tokens",
    },
    "vllm.v1.spec_decode.metadata.SpecDecodeMetadata": {
        "num_draft_tokens": "draft lengths as scheduled",
        "draft_token_ids": "drafts as scheduled",
    },
    f"{_SAMPLE}.sampler.Sampler": {
        "logprobs_mode": "kind of log-probabilities",
        "compute_logprobs": "log-probabilities of rows",
        "gather_logprobs": "log-probabilities of the most likely tokens",
        "topk_topp_sampler": "draws tokens of coupled requests; see its forward",
    },
    f"{_SAMPLE}.ops.topk_topp_sampler.TopKTopPSampler": {
        "forward": "draws tokens of coupled requests; gives out the texts that `verify` scores",
        "forward_cpu": "takes an integer from a generator for each token, not a row of noise",
        "use_fp64_gumbel": "dtype of the noise",
    },
    "vllm.v1.outputs.LogprobsTensors": {
        "logprob_token_ids": "tokens with log-probabilities",
        "logprobs": "log-probabilities",
    },
    "vllm.v1.core.sched.scheduler.Scheduler": {
        "log_stats": "whether anyone reads the counts",
        "num_spec_tokens": "empty statistics of a step",
    },
    _SPECULATION_BASE: {
        "_enable_probabilistic_draft_probs": "set for block verification",
    },
    _SPECULATION: {
        "draft_sample_method": "whether a drafter keeps its probabilities",
        "disable_padded_drafter_batch": "drafts after bookkeeping, on the host",
    },
    "vllm.config.vllm.VllmConfig": {
        "model_config": "the target",
        "additional_config": "tells compiled levels apart",
    },
    "vllm.config.model.ModelConfig": {
        "dtype": "type of exit heads",
        "seed": "seeds of requests without one",
    },
    "vllm.config.scheduler.SchedulerConfig": {
        "max_num_batched_tokens": "tokens of one forward pass",
    },
    "vllm.v1.kv_cache_interface.KVCacheConfig": {
        "kv_cache_groups": "groups of the levels' layers",
        "num_blocks": "slots that a head fills",
    },
    "vllm.v1.kv_cache_interface.AttentionSpec": {"block_size": "slots that a head fills"},
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": {
        "layer_names": "layers of a group",
        "kv_cache_spec": "cache of a group",
    },
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": {"kv_cache_specs": "cache of a layer"},
    "vllm.model_executor.layers.attention_layer_base.AttentionLayerBase": {
        "get_attn_backend": "backend of a layer",
        "get_kv_cache_spec": "whether a layer has a cache",
    },
    "vllm.v1.attention.backend.AttentionBackend": {"full_cls_name": "tells groups apart"},
    f"{_SAMPLE}.thinking_budget_state.ThinkingBudgetStateHolder": {
        "has_tracked_requests": "whether a request has a thinking budget",
        "update_state": "follows a request's thinking",
        "apply_to_logits": "ends a request's thinking",
    },
    "vllm.sampling_params.SamplingParams": {
        "seed": "uniforms of a request",
        "temperature": "greedy requests need no noise",
        "max_tokens": "limit of the drafts",
        "ignore_eos": "end of the drafts",
        "eos_token_id": "end of the drafts",
        "extra_args": "holds a text that `verify` scores",
    },
}


def _register(name: str, how: How, why: str, parameters: tuple[str, ...] | None = None) -> None:
    REGISTRY.register(Hook(name, how, why, parameters))


REGISTRY.depends_on(_OVERRIDDEN, _READ)
for _name in (
    "LlamaForCausalLM.compute_logits",
    "LlamaForCausalLM.model",
    "LlamaModel.aux_hidden_state_layers",
    "LlamaModel.end_layer",
    "LlamaModel.forward",
    "LlamaModel.layers",
    "LlamaModel.norm",
):
    _register(f"vllm.model_executor.models.llama.{_name}", "read late", "runs early exits")
for _name in (
    "Eagle3LlamaForCausalLM.combine_hidden_states",
    "Eagle3LlamaForCausalLM.draft_id_to_target_id",
    "Eagle3LlamaForCausalLM.has_own_embed_tokens",
    "Eagle3LlamaForCausalLM.has_own_lm_head",
    "Eagle3LlamaForCausalLM.lm_head",
    "Eagle3LlamaForCausalLM.model",
    "LlamaModel.embed_tokens",
    "LlamaModel.fc",
    "LlamaModel.use_aux_hidden_state",
):
    _register(f"vllm.model_executor.models.llama_eagle3.{_name}", "read late", "runs EAGLE-3 heads")
_register(
    "vllm.model_executor.models.interfaces.SupportsEagle3"
    ".get_eagle3_default_aux_hidden_state_layers",
    "read",
    "layers of a head that names none",
    ("self",),
)
_register(f"{_SPECULATION_BASE}._create_draft_vllm_config", "read", "configures a head", ("self",))
_register(
    "vllm.v1.spec_decode.ngram_proposer._find_longest_matched_ngram_and_propose_tokens",
    "read late",
    "matches n-grams",
    ("origin_tokens", "min_ngram", "max_ngram", "max_model_len", "k"),
)
