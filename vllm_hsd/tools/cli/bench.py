"""`vllm-hsd bench`: speculative configurations against no speculation, on a user's own models."""

from __future__ import annotations

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_hsd.config.cascade_config import read_speculative_config
from vllm_hsd.errors import UserError
from vllm_hsd.tools import system
from vllm_hsd.tools.audit.drafters import keeps_seeds
from vllm_hsd.tools.cli import bench_files, bench_report, greedy
from vllm_hsd.tools.cli.bench_jobs import Comparison, Results, Setup
from vllm_hsd.tools.cli.bench_runs import measure
from vllm_hsd.tools.cli.options import (
    add_engine_options,
    engine_args,
    integers,
    json_object,
    progress,
    rendered,
)
from vllm_hsd.tools.dtype import choose_dtype
from vllm_hsd.tools.engine import configuration_error
from vllm_hsd.tools.planner.prompts import encode, fit, read_requests
from vllm_hsd.tools.worker_process import LOGS, WorkerProcess

DEFAULT_PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List the steps to make a cup of tea.",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in all?",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python? Answer in one sentence.",
    "Translate into French: Where is the nearest train station?",
    "Give three reasons to learn a second language.",
)
# Lower ones above 0 are raised to it by vLLM.
LEAST_TEMPERATURE = 0.01
# Arguments of engines that may hold what no file is to show.
SECRET = "hf_token", "hf_overrides"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="compare speculative configurations with no speculation on your own models",
        description=(
            "Compare speculative configurations, vLLM's own methods too, with no speculation. "
            "Every answer has exactly --max-tokens tokens, but those that follow a grammar. Prints "
            "a table and writes bench.csv, bench.json and bench.html. A line of --prompts may also "
            "hold 'extra_args' and 'structured_outputs', as for SamplingParams."
        ),
        epilog="example:\n"
        "  vllm-hsd bench --model Qwen/Qwen3-8B --batch-sizes 1,8 --speculative-config '{\n"
        '    "method": "hsd", "num_speculative_tokens": 8, "levels": [{"ngram": {"max": 4},\n'
        '    "num_tokens": 4}, {"model": "Qwen/Qwen3-0.6B"}]}'
        "'",
    )
    add = parser.add_argument
    add("--model", required=True, help="the target: a name or a directory")
    add(
        "--speculative-config", action="append", default=None, metavar="JSON",
        help="as for `vllm serve`; give the option once per configuration",
    )  # fmt: skip
    add("--batch-sizes", type=integers, default="1", metavar="N[,N...]", help="requests at a time")
    add("--max-tokens", type=int, default=64, metavar="N", help="tokens of every answer")
    add("--num-prompts", type=int, default=8, metavar="N", help="prompts per round")
    add("--rounds", type=int, default=3, metavar="R", help="repetitions; the spread is over these")
    add(
        "--control", action="store_true",
        help="no speculation again, in an engine that loads last: how far equal engines differ",
    )  # fmt: skip
    add_engine_options(parser, "0,1", "bench")
    parser.set_defaults(run=command)


def command(arguments: argparse.Namespace) -> int:
    """Run `vllm-hsd bench`; returns the status of `run`."""
    for option in ("max_tokens", "num_prompts", "rounds"):
        if getattr(arguments, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} must be at least 1.")
    comparison = comparison_of(
        arguments,
        arguments.speculative_config or [],
        batch_sizes=in_order(arguments.batch_sizes, "--batch-sizes", 1),
        temperatures=temperatures(arguments),
        max_tokens=arguments.max_tokens,
        num_prompts=arguments.num_prompts,
        rounds=arguments.rounds,
    )
    if arguments.control:
        comparison = replace(comparison, configs=[*comparison.configs, None])
    return run(comparison)


def comparison_of(arguments: argparse.Namespace, configs: list[str], **extent: Any) -> Comparison:
    """The model and prompts of the arguments, and configurations, compared to the given extent."""
    given = [
        _as_read(json_object(text, f"--speculative-config number {n}"))
        for n, text in enumerate(configs, 1)
    ]
    held = engine_args(
        arguments.engine_args,
        getattr(arguments, "batch_sizes", ()),
        model="use --model",
        dtype="use --dtype",
        speculative_config="use --speculative-config",
    )
    requests: list[tuple[Any, dict[str, Any]]] = (
        read_requests(arguments.prompts)
        if arguments.prompts
        else [([{"role": "user", "content": text}], {}) for text in DEFAULT_PROMPTS]
    )
    return Comparison(
        model=arguments.model,
        configs=[None, *given],
        prompts=[prompt for prompt, _ in requests],
        engine_args={"dtype": arguments.dtype, **held},
        output=arguments.output,
        sampling=[sampling for _, sampling in requests],
        **extent,
    )


def _as_read(given: dict[str, Any]) -> dict[str, Any]:
    """A configuration, with underscores in its keys where it is served by this package."""
    read = read_speculative_config(given)
    return read if keeps_seeds(read) else given


def in_order(values: list[Any], option: str, least: int) -> list[Any]:
    """The different values of an option in ascending order, all finite and at least `least`."""
    if not all(least <= value < math.inf for value in values):
        raise UserError(f"{option} must be at least {least}.")
    return sorted(set(values))


def temperatures(arguments: argparse.Namespace) -> list[float]:
    """Those of the arguments, in ascending order."""
    found = in_order(arguments.temperatures, "--temperatures", 0)
    if any(0 < temperature < LEAST_TEMPERATURE for temperature in found):
        raise UserError(
            f"--temperatures must be 0 or at least {LEAST_TEMPERATURE}: vLLM raises lower ones to "
            "it."
        )
    return found


def run(comparison: Comparison) -> int:
    """Measure, print the table and write the files.

    Returns:
        1 if a configuration could not run, or its greedy outputs differ from those of no
        speculation (in 16 bits: elsewhere than at near ties of the target), else 0.
    """
    comparison, setup = prepare(comparison)
    # Not where vLLM has refused: the files of an earlier run stay.
    for name in bench_files.NAMES:
        (comparison.output / name).unlink(missing_ok=True)
    results = Results(comparison, metadata=describe(comparison, setup))
    print("\n".join(bench_report.heading(results.metadata)), flush=True)
    chats = any(isinstance(prompt, list) for prompt in comparison.prompts)
    if chats and not setup.has_chat_template:
        print("The model has no chat template: prompts are plain text.", flush=True)
    measure(results, setup)
    rows = bench_report.rows(results)
    written = bench_files.write(results, rows)
    print(rendered(bench_report.report(results, rows)).export_text())
    print(written)
    return 1 if results.errors or greedy.unexplained(results.differences, setup.dtype) else 0


def prepare_output(output: Path, *results: str) -> None:
    """Make the directory of the results; logs and `results` of earlier runs are removed."""
    directory = output / LOGS
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for older in (*directory.glob("*.log"), *(output / name for name in results)):
            older.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(f"--output '{output}' cannot be used ({error}).") from None


def prepare(comparison: Comparison, *results: str) -> tuple[Comparison, Setup]:
    """Make the directory of the results, check the configurations and settle the dtype.

    On a CPU a dtype that was not asked for is probed, and printed; so is that prompts were cut.

    Raises:
        UserError: vLLM refuses the model or a configuration, or the model runs in no dtype.
    """
    model = comparison.model
    if model.startswith((".", "/", "~")) and not Path(model).is_dir():
        raise UserError(f"--model '{model}' is not a directory.")
    prepare_output(comparison.output, *results)
    setup = inspect(comparison)
    if setup.cut:
        print(setup.cut, flush=True)
    if setup.device != "cpu" or comparison.engine_args.get("dtype", "auto") != "auto":
        return comparison, setup
    progress("probing bfloat16 and float32")
    choice = choose_dtype(model, comparison.engine_args)
    print(f"dtype: {choice}", flush=True)
    engine_args = comparison.engine_args | {"dtype": choice.dtype}
    return replace(comparison, engine_args=engine_args), replace(setup, dtype=choice.dtype)


def inspect(comparison: Comparison) -> Setup:
    """Check all configurations and encode the prompts, without loading weights.

    Raises:
        UserError: vLLM refuses the model or a configuration.
    """
    progress("checking the configurations")
    with WorkerProcess("vLLM", log=comparison.output / LOGS / "check.log") as worker:
        setup: Setup = worker.call(_inspect, comparison)
    for index, error in enumerate(setup.errors):
        if error is not None:
            number = f" number {index}" if len(comparison.configs) > 2 else ""
            what = f"--speculative-config{number}" if index else "--model or --engine-args"
            raise UserError(f"{what}: {error}")
    return setup


def _inspect(comparison: Comparison) -> Setup:
    """Runs in a process of its own, which imports vLLM."""
    import psutil
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    from vllm_hsd.host.request_keys import keys_of

    base, max_tokens = comparison.base_args, comparison.max_tokens
    every = [
        base | ({"speculative_config": config} if config else {}) for config in comparison.configs
    ]
    errors = [configuration_error(each) for each in every]
    if any(errors):
        return Setup(errors)
    keys: list[set[str]] = []
    if any("extra_args" in each for each in comparison.sampling):
        configs = (EngineArgs(**each).create_engine_config() for each in every)
        keys = [keys_of(config.speculative_config) for config in configs]
    model = EngineArgs(**base).create_engine_config().model_config
    longest = model.max_model_len - max_tokens
    if longest < 1:
        fault = f"max_tokens={max_tokens} does not fit into a context of {model.max_model_len}."
        return Setup([fault])
    tokenizer = cached_tokenizer_from_config(model)
    prompts, cut = fit([encode(tokenizer, each) for each in comparison.prompts], longest)
    return Setup(
        errors,
        prompts,
        bool(getattr(tokenizer, "chat_template", True)),
        model.max_model_len,
        str(model.dtype).removeprefix("torch."),
        current_platform.get_device_name() if current_platform.is_cuda_alike() else "cpu",
        torch.get_num_threads(),
        psutil.virtual_memory().available,
        keys,
        cut,
    )


def describe(comparison: Comparison, setup: Setup) -> dict[str, Any]:
    """Metadata: the machine, the versions, and what was asked for."""
    return {
        "model": comparison.model,
        "dtype": setup.dtype,
        "machine": bench_report.machine(setup.device, setup.threads),
        "on_host": setup.device == "cpu",
        "versions": system.versions(),
        "max_tokens": comparison.max_tokens,
        "num_prompts": comparison.num_prompts,
        "rounds": comparison.rounds,
        "engine_args": {k: v for k, v in comparison.engine_args.items() if k not in SECRET},
    }
