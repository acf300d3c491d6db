"""GPU memory of a cascade, against what follows from its sizes.

The cache gets what is left: the difference to an engine without speculation is what the levels
cost, their weights, rows and CUDA graphs.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common import on_worker
from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting

TARGET, LEVELS, K, BATCH = "8B", ("0.6B", "1.7B"), 5, 64
# Bytes that may be missing in the prediction, of what the cascade takes.
TOLERANCE = 0.1


def run(setting: Setting) -> Finding:
    """Two engines."""
    engines.require_vllm()
    low, high = (engines.shaped(setting, size) for size in LEVELS)
    config = engines.cascade(K, {"model": low, "num_tokens": 2}, {"model": high})
    found = {}
    for name, speculative in (("plain", None), ("cascade", config)):
        arguments = engines.DUMMY_ARGS | {
            "model": engines.shaped(setting, TARGET),
            "max_num_seqs": 8 if setting.toy else BATCH,
            "speculative_config": speculative,
            "gpu_memory_utilization": 0.8,
        }
        with engines.engine(setting, f"memory {name}", arguments) as process:
            found[name] = process.call(on_worker, _measured)
    plain, ours = found["plain"], found["cascade"]
    weights = sum(2 * engines.parameters(size) for size in LEVELS)
    graphs = max(ours["graphs"] - plain["graphs"], 0)
    predicted = weights + ours["rows"] + graphs
    taken = plain["cache"] - ours["cache"]
    rows = [
        {"what": "cache without speculation", "bytes": plain["cache"]},
        {"what": "cache with the cascade", "bytes": ours["cache"]},
        {"what": "weights of the levels, predicted", "bytes": weights},
        {"what": "buffers of a proposal", "bytes": ours["rows"]},
        {"what": "more memory in CUDA graphs", "bytes": graphs},
    ]
    line = f"The cascade takes {_gib(taken)} of the cache, predicted {_gib(predicted)}."
    if not setting.toy and abs(taken - predicted) > TOLERANCE * predicted:
        pytest.fail(f"{line} More than {TOLERANCE:.0%} apart.")
    return Finding([line, f"Buffers of a proposal: {_gib(ours['rows'])}."], rows)


def _measured(worker: Any) -> dict[str, int]:
    import torch

    runner = worker.model_runner
    caches = {
        cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes()
        for cache in _tensors(runner.kv_caches)
    }
    state = getattr(runner.speculator, "state", None) if runner.speculator else None
    stored = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in _tensors(vars(state) if state is not None else {})
    }
    pools: dict[Any, int] = {}
    if torch.cuda.is_available():
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            pools[pool] = pools.get(pool, 0) + segment["total_size"]
    # Pool (0, 0) is the allocator's own; the others belong to graphs.
    graphs = sum(size for pool, size in pools.items() if pool != (0, 0))
    return {"cache": sum(caches.values()), "rows": sum(stored.values()), "graphs": graphs}


def _tensors(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
