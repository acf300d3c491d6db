"""Names of vLLM that classes of `runner_v1` override (see `Registry.overrides`)."""

from __future__ import annotations

from vllm_hsd.runner_v1.hooks import REGISTRY

_SPECULATION = "vllm.config.speculative.SpeculativeConfig"
_PROPOSER = "vllm.v1.spec_decode.draft_model.DraftModelProposer"
_SAMPLER = "vllm.v1.sample.rejection_sampler.RejectionSampler"

REGISTRY.overrides(
    {
        f"{_SPECULATION}.uses_draft_model": (
            "gives the drafts their slots in the cache",
            ("self",),
        ),
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
)
