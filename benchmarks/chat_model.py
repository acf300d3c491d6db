"""What the benchmarks of the real chat model share: their options, and what they compare."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models.smollm2 import smollm2
from vllm_hsd.cli import bench
from vllm_hsd.cli.bench_jobs import Comparison, Setup


def options(description: str, output: Path) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark of the chat model.

    Args:
        description: docstring of the benchmark; its first line is shown.
        output: default directory of the results.
    """
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    parser.add_argument("--model", help="name or directory (default: SmolLM2, converted on demand)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, default=output)
    return parser


def compared(
    chosen: argparse.Namespace,
    configs: Sequence[dict[str, Any] | None],
    prompts: Sequence[Any],
    *,
    batch_sizes: Sequence[int] = (1,),
    temperatures: Sequence[float],
    rounds: int = 1,
    **engine_args: Any,
) -> tuple[Comparison, Setup]:
    """Configurations of the chat model, checked, in the dtype that was asked for or probed.

    Args:
        chosen: values of `options`.
        engine_args: further ones, of `vllm.LLM`.

    Raises:
        UserError: vLLM refuses the model or a configuration, or the model runs in no dtype.
    """
    comparison = Comparison(
        # Results name the model: a relative path says nothing about the machine.
        model=chosen.model or os.path.relpath(smollm2()),
        configs=list(configs),
        prompts=list(prompts),
        batch_sizes=list(batch_sizes),
        temperatures=list(temperatures),
        max_tokens=chosen.max_tokens,
        num_prompts=len(prompts),
        rounds=rounds,
        engine_args={"dtype": chosen.dtype, "enforce_eager": True, **engine_args},
        output=chosen.output,
    )
    return bench.with_probed_dtype(comparison, bench.inspect(comparison))
