"""Kernels of a server on a CPU are compiled when it starts, as vLLM has it on a GPU."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

from vllm.platforms import current_platform
from vllm.utils import jit_monitor
from vllm.v1.worker.gpu.warmup import warmup_kernels

from vllm_hsd.host.engine_hooks import NeedsHooks
from vllm_hsd.host.hooks import REGISTRY, RUNNER
from vllm_hsd.host.host_speculator import HostSpeculator

logger = logging.getLogger(__name__)
# Kernels have variants for one request and for several.
_REQUESTS = 2


@REGISTRY.replaces(
    f"{RUNNER}.initialize_kv_cache",
    "self kv_cache_config is_profiling kv_cache_allocation_context",
    why="runs vLLM's own warm-up of kernels on a CPU, where they were compiled in requests",
    until="vLLM's CPU worker warms its V2 runner up",
)
def initialize_kv_cache(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    config = self.vllm_config
    if not current_platform.is_cpu() or not isinstance(config.speculative_config, NeedsHooks):
        return
    if hosted := isinstance(self.speculator, HostSpeculator):
        self.speculator.time_levels()
    wanted, scheduler = config.kernel_config.enable_jit_warmup, self.scheduler_config
    # Else vLLM 0.33 does it once more, and levels learn from made-up requests.
    config.kernel_config.enable_jit_warmup = False
    if not wanted:
        return
    # Its prompts are a token longer than a draft with its root, and three steps follow them.
    longest = self.decode_query_len
    if longest >= scheduler.max_num_batched_tokens or 4 * longest + 2 >= self.max_model_len:
        logger.info("Kernels are compiled in requests: drafts are too long for this warm-up.")
        return
    began, largest = time.perf_counter(), scheduler.max_num_seqs
    scheduler.max_num_seqs = min(largest, _REQUESTS)
    try:
        with self.speculator.warming_up() if hosted else nullcontext():
            warmup_kernels(self, self.execute_model, self.sample_tokens)
    finally:
        scheduler.max_num_seqs = largest
    logger.info("Kernels were compiled or found in %.1f s.", time.perf_counter() - began)
    observed = config.observability_config
    jit_monitor.activate(mode=observed.jit_monitor_mode, verbose=observed.jit_monitor_verbose)
