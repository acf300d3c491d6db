"""Replacements of functions of vLLM's V2 runner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    replace_as,
)

from vllm_hsd.cascade.shared_outputs import SharedOutputs
from vllm_hsd.config import platform
from vllm_hsd.errors import UserError
from vllm_hsd.host.cascade_sampler import serve
from vllm_hsd.host.draft_models import loading
from vllm_hsd.host.engine_hooks import NeedsHooks
from vllm_hsd.host.head_sources import HeadSources, with_lookups
from vllm_hsd.host.hooks import REGISTRY, RUNNER, replace_on
from vllm_hsd.host.host_speculator import HostSpeculator
from vllm_hsd.host.registry import PLUGIN_ISSUE
from vllm_hsd.host.sampler import BlockRejectionSampler
from vllm_hsd.host.speculator import CascadeSpeculator

_LORA_INPUTS = "vllm.v1.worker.gpu.lora_utils.LoraState.make_lora_inputs"


@REGISTRY.replaces(
    f"{RUNNER}.load_model",
    "self load_dummy_weights args model kwargs",
    why="puts our verifier in the place of vLLM's once the runner has made its sampler and drafter",
    until="vLLM lets a plugin choose the rejection sampler",
)
def load_model(original, self, *args, **kwargs):
    head = getattr(self.speculator, "head", None)
    if head is not None:
        # vLLM then has the target give out the states that the head names.
        self.use_aux_hidden_state_outputs = head.reads_inner_states
    if named := getattr(self.speculative_config, "hsd_named", ""):
        self.speculator.load_model = loading(named)(self.speculator.load_model)
    original(self, *args, **kwargs)
    sources = getattr(self.speculative_config, "hsd_sources", None)
    if sources is not None and not isinstance(self.speculator, HeadSources):
        raise UserError(
            f"levels[0].sources: vLLM's {type(self.speculator).__name__} cannot draft next to "
            "lookups on the V2 runner: leave these or that source out."
        )
    if isinstance(self.speculative_config, NeedsHooks):
        serve(self)
        if self.lora_config:
            replace_on(self.lora_state, _LORA_INPUTS, by=self.req_states)
        if isinstance(self.rejection_sampler, BlockRejectionSampler):
            self.rejection_sampler.warm_up(self.model_config.dtype, self.speculator.draft_logits)


@REGISTRY.replaces(
    f"{RUNNER}.get_kv_cache_spec",
    "self",
    why="keeps caches whole where levels read late, on a CPU: vLLM frees blocks before a window",
    until="vLLM tells a drafter which blocks it has freed",
)
def get_kv_cache_spec(original, self):
    specs, levels = original(self), getattr(self.speculative_config, "level_configs", [])
    if platform.read_on_host() and any(level is not None for level in levels):
        # Attention takes its window from the layers.
        whole = {"sliding_window": None, "attention_chunk_size": None, "page_size_padded": None}
        whole["block_size"] = self.cache_config.block_size
        for name, spec in specs.items():
            if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
                drop = ("extra_retained_tokens",)
                specs[name] = replace_as(spec, FullAttentionSpec, drop=drop, **whole)
    return specs


@REGISTRY.replaces_on_runner(
    _LORA_INPUTS,
    "self req_ids idx_mapping num_scheduled_tokens",
    why="gives every row of a draft its request's adapter of the target's last layer; vLLM has one "
    "row for each request",
    until="vLLM does so",
)
def make_lora_inputs(original, states, req_ids, idx_mapping, num_scheduled_tokens):
    requests, tokens, adapters = original(req_ids, idx_mapping, num_scheduled_tokens)
    computed = states.num_computed_prefill_tokens[idx_mapping]
    decodes = computed >= states.prefill_len.np[idx_mapping]
    # A prompt's last chunk may have places of drafts after it.
    after = computed + num_scheduled_tokens - states.prefill_len.np[idx_mapping]
    rows = np.where(decodes, num_scheduled_tokens, 1 + np.maximum(after, 0))
    return tuple(np.repeat(requests, rows)), tokens, adapters


@REGISTRY.replaces(
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator."
    "TargetDependentARSpeculator.__new__",
    None,
    why="lets lookups draft next to a head of the target",
    until="vLLM has a plugin interface for drafters that run models",
    issue=PLUGIN_ISSUE,
)
def new_head(original, cls, vllm_config, *args, **kwargs):
    if getattr(vllm_config.speculative_config, "hsd_sources", None) is not None:
        cls = with_lookups(cls)
    return original(cls) if original is object.__new__ else original(cls, vllm_config)


@REGISTRY.replaces(
    "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator.StandaloneARSpeculator.__new__",
    None,
    why="makes the cascade where the runner makes its draft model; the subclass passes the "
    "runner's isinstance checks, a factory would not",
    until="vLLM has a plugin interface for drafters that run models",
    issue=PLUGIN_ISSUE,
)
def new_draft_model_speculator(original, cls, vllm_config, *args, **kwargs):
    stock = cls.__name__ == "StandaloneARSpeculator"
    if stock and getattr(vllm_config.speculative_config, "hsd", None) is not None:
        # Several drafts of a model have a program of their own, on a CPU too.
        several = vllm_config.speculative_config.hsd.several_drafts
        on_host = platform.read_on_host() and not several
        cls = HostSpeculator if on_host else CascadeSpeculator
    return original(cls) if original is object.__new__ else original(cls, vllm_config)


@REGISTRY.replaces_on_runner(
    f"{RUNNER}.finish_requests",
    "self scheduler_output",
    why="shares the outputs of requests before their slots are given to others",
    until="vLLM tells drafters of the V2 runner which requests end",
    issue=PLUGIN_ISSUE,
)
def finish_requests(
    original: Any, sharing: tuple[Any, list[SharedOutputs]], scheduler_output: Any
) -> None:
    states, shared = sharing
    # In the same order on every rank.
    ended = sorted(scheduler_output.finished_req_ids & states.req_id_to_index.keys())
    if ended:
        index = [states.req_id_to_index[request_id] for request_id in ended]
        slots, begins = (
            async_tensor_h2d(part, device=states.device, dtype=torch.int32)
            for part in (index, states.prompt_len.np[index])
        )
        for outputs in shared:
            outputs.add(slots, begins, states.total_len.gpu, states.all_token_ids.gpu)
    original(scheduler_output)
