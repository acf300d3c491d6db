"""Comparisons of `vllm-hsd bench`: made up; of tiny models, and what it must print and write."""

import json
from collections.abc import Callable
from pathlib import Path

from support.cascades import cascade

from vllm_hsd.tools.audit.tiny_models import Family
from vllm_hsd.tools.cli.bench_jobs import Comparison, Setup

SETUP = Setup([None] * 9, [[1, 2], [3]], True, 1000, "float32", "cpu", 1, 1 << 40)


def make_comparison(output: Path, configs: list, prompts: str, **changes) -> Comparison:
    """Of models that are not there; every character is a prompt."""
    sizes = {"batch_sizes": [1], "max_tokens": 5, "num_prompts": len(prompts), "rounds": 1}
    options = {"model": "org/target", "engine_args": {}, "temperatures": [0.0], **sizes, **changes}
    return Comparison(configs=configs, prompts=list(prompts), output=output, **options)


def check_bench(vllm_hsd: Callable[..., str], family: Family, directory: Path) -> None:
    """Run `vllm_hsd("bench", ...)`, which returns what the command prints, and check its output."""
    levels = [{"model": family.small, "num_tokens": 2}, {"model": family.mid}]
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"turns": ["def f(", "later"]}\n{"prompt": "import "}\n')
    options = {
        "--model": family.target,
        "--speculative-config": json.dumps(cascade(levels)),
        "--prompts": prompts,
        "--batch-sizes": 2,
        "--max-tokens": 8,
        "--num-prompts": 2,
        "--rounds": 2,
        "--dtype": "float32",
        "--engine-args": json.dumps({"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}),
        "--output": directory,
    }
    printed = vllm_hsd("bench", *(str(part) for pair in options.items() for part in pair))
    assert "no chat template" in printed and "small 2, mid 4" in printed
    rows = json.loads((directory / "bench.json").read_text())["rows"]
    assert len(rows) == 2 * 2 and (directory / "bench.csv").exists()
    for row in rows:
        assert row["greedy_differences"] == (0 if row["temperature"] == 0 else None)
        assert 0 < row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["tokens_per_second"] > 0 and row["ttft_ms"] > 0 and row["tpot_ms"] > 0
        assert 1 <= row["tokens_per_step"] <= 5
        assert len(row["acceptance"]) == (2 if row["config"] else 0)
        assert all(0 < rate <= 1 for rate in row["acceptance"])
