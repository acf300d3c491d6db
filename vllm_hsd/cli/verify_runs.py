"""Runs of `vllm-hsd verify`: text with speculation, judged by the same model without."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from vllm_hsd.cli import bench, greedy, verify_report
from vllm_hsd.cli.bench_jobs import Comparison, Job, Results
from vllm_hsd.cli.bench_runs import engine_arguments, progress
from vllm_hsd.cli.verify_results import (
    ANSWER_TOKENS,
    LARGEST_GAP,
    SEED,
    SEEDED_TOKENS,
    Outcome,
    Verification,
)
from vllm_hsd.cli.verify_servers import run_on_servers
from vllm_hsd.engine import EngineProcess, Generation
from vllm_hsd.errors import UserError
from vllm_hsd.lossless import sampled, seeded, self_test
from vllm_hsd.lossless.drafters import OFFERS, Drafter, drafters_of, keeps_seeds
from vllm_hsd.lossless.sampled import Setting, Texts

BATCH_SIZE = 64
# The engine without speculation runs where its sampler can be made to give out a text.
SCORER_ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
SCORER_ARGUMENTS = {"async_scheduling": False}
NOT_RECORDED = (
    "What was drafted could not be recorded (it is on vLLM's V1 runner with "
    '"async_scheduling": false), or nothing was: only models among the drafters were tested for '
    "leaning towards them."
)


def command(arguments: argparse.Namespace) -> int:
    """Run `vllm-hsd verify`; 0 if nothing speaks against losslessness, else 1.

    Raises:
        UserError: the arguments, the model or the configuration cannot be used.
    """
    if arguments.self_test:
        return _self_test(arguments)
    verification = parse(arguments)
    if verification.servers:
        outcome = run_on_servers(verification, verification.servers, add_drafter)
    else:
        outcome = run(verification)
    print(verify_report.page(outcome))
    path = verification.comparison.output / "verify.json"
    verify_report.write(outcome, path)
    print(f"Written: {path}")
    return 0 if outcome.lossless else 1


def _self_test(arguments: argparse.Namespace) -> int:
    if arguments.model or arguments.speculative_config:
        raise UserError("--self-test has models of its own: leave out --model and the rest.")
    bench.prepare_output(arguments.output)
    results = self_test.run(arguments.output, arguments.tokens, progress)
    print(verify_report.self_test_page(results))
    return 0 if all(result.as_expected for result in results) else 1


def parse(arguments: argparse.Namespace) -> Verification:
    """What the arguments ask for.

    Raises:
        UserError: an argument is out of range or not JSON.
    """
    servers = _servers(arguments)
    for option in () if servers else ("model", "speculative_config"):
        if not getattr(arguments, option):
            raise UserError(f"--{option.replace('_', '-')} is missing.")
    temperatures = bench.in_order(arguments.temperatures, "--temperatures", 0)
    top_p = bench.in_order(arguments.top_p, "--top-p", 0)
    if not 0 < top_p[0] <= top_p[-1] <= 1:
        raise UserError("--top-p must be above 0 and at most 1.")
    if arguments.tokens < ANSWER_TOKENS:
        raise UserError(f"--tokens must be at least {ANSWER_TOKENS}, one answer.")
    # A server's configuration is its own affair.
    arguments.speculative_config = [arguments.speculative_config or "{}"]
    arguments.model = arguments.model or ""
    comparison = bench.comparison_of(
        arguments,
        batch_sizes=[BATCH_SIZE],
        temperatures=temperatures,
        max_tokens=ANSWER_TOKENS,
        num_prompts=1,
        rounds=1,
    )
    return Verification(
        comparison,
        [
            Setting(temperature, {} if p == 1 else {"top_p": p})
            for temperature in temperatures
            if temperature > 0
            for p in top_p
        ],
        arguments.tokens,
        greedy=0 in temperatures,
        equal_drafter=arguments.equal_drafter,
        servers=servers,
        drafter=arguments.drafter,
    )


def _servers(arguments: argparse.Namespace) -> tuple[str, str] | None:
    if not arguments.url and not arguments.plain_url:
        if arguments.drafter:
            raise UserError(
                "--drafter names what a server (--url) drafts with; an engine's own drafters are "
                "read from --speculative-config: remove it."
            )
        return None
    if not arguments.url or not arguments.plain_url:
        raise UserError("--url and --plain-url belong together: servers with and without.")
    if arguments.speculative_config or arguments.equal_drafter:
        raise UserError(
            "--url verifies a running server: leave out --speculative-config and --equal-drafter."
        )
    return arguments.url, arguments.plain_url


def run(verification: Verification) -> Outcome:
    """Generate with speculation, then judge it by the same model without.

    Raises:
        UserError: the model or the configuration cannot be used, or an engine failed.
    """
    comparison = verification.comparison
    bench.prepare_output(comparison.output)
    comparison, setup = bench.with_probed_dtype(comparison, bench.inspect(comparison))
    verification = replace(verification, comparison=comparison)
    if setup.dtype not in LARGEST_GAP:
        raise UserError(f"--dtype {setup.dtype}: rounding is known for {', '.join(LARGEST_GAP)}.")
    arguments = engine_arguments(comparison, setup, 1)
    results = Results(comparison)
    seconds: dict[str, float] = {}
    count = min(len(setup.prompt_ids), BATCH_SIZE)
    greedy_jobs = [Job(i, 0, BATCH_SIZE, 0.0, 0, tuple(range(count))) for i in (0, 1)]
    prompts, settings = setup.prompt_ids, verification.settings

    config = comparison.configs[1]
    drafters = drafters_of(config or {})
    untested = []
    with _loaded(comparison, "speculation", arguments | {"speculative_config": config}) as engine:
        began = time.perf_counter()
        if verification.greedy:
            results.generations[greedy_jobs[1]] = _greedy(engine, prompts[:count])
        with_seeds = None
        if settings and keeps_seeds(config or {}) and engine.call(_is_v1):
            plan = sampled.planned(prompts, settings, SEEDED_TOKENS, ANSWER_TOKENS, seeded=1)
            with_seeds = sampled.generate(engine, plan, BATCH_SIZE, progress)
        plan = sampled.planned(
            prompts,
            settings,
            verification.num_tokens,
            ANSWER_TOKENS,
            # The rule of requests with seeds is compared exactly.
            seeded=0 if with_seeds else 2,
        )
        texts = sampled.generate(
            engine,
            plan,
            BATCH_SIZE,
            progress,
            offers=OFFERS if drafters.recorded else None,
            certain=drafters.certain,
        )
        seconds["speculation"] = time.perf_counter() - began
    if settings:
        if drafters.recorded and OFFERS not in texts.rows:
            untested.append(NOT_RECORDED)
        for drafter in drafters.models:
            if (drafter.model, drafter.temperature_scale) == (comparison.model, 1):
                untested.append(f"{drafter.name} is the target itself: nothing can lean to it.")
                continue
            began = time.perf_counter()
            add_drafter(comparison, arguments, drafter, texts)
            seconds[f"drafter {drafter.name}"] = time.perf_counter() - began
    with _loaded(
        comparison, "no speculation", arguments | SCORER_ARGUMENTS, SCORER_ENVIRONMENT
    ) as engine:
        began = time.perf_counter()
        if verification.greedy:
            results.generations[greedy_jobs[0]] = _greedy(engine, prompts[:count])
            found = greedy.differences(results, prompts)
            results.differences = greedy.with_gaps(engine, found) if found else []
        found_seeded = None
        if with_seeds is not None:
            found_seeded = seeded.compared(engine, with_seeds, LARGEST_GAP[setup.dtype])
        ranges = sampled.scored(engine, texts, BATCH_SIZE, progress)
        seconds["no speculation"] = time.perf_counter() - began
    equal = None
    if verification.equal_drafter:
        equal = _equal_drafter(verification, arguments, prompts)
    return Outcome(
        verification,
        bench.describe(comparison, setup),
        texts,
        sampled.checks(settings, texts, ranges, setup.dtype, SEED),
        results,
        setup.dtype,
        equal,
        seconds,
        untested,
        found_seeded,
    )


def _is_v1(llm: Any) -> bool:
    return bool(llm.collective_rpc(_runs_v1)[0])


def _runs_v1(worker: Any) -> bool:
    return hasattr(worker.model_runner, "discard_request_mask")


def add_drafter(
    comparison: Comparison, arguments: dict[str, Any], drafter: Drafter, texts: Texts
) -> None:
    """Fill in a drafter's distributions, from an engine that serves it alone.

    Args:
        arguments: of the target's engine.

    Raises:
        UserError: the drafter cannot be loaded.
    """
    with _loaded(
        comparison,
        f"drafter {drafter.name}",
        arguments | SCORER_ARGUMENTS | {"model": drafter.model},
        SCORER_ENVIRONMENT,
    ) as engine:
        scale = drafter.temperature_scale
        sampled.add_drafter(engine, texts, drafter.name, scale, BATCH_SIZE, progress)


def equal_drafter_config(config: dict[str, Any], model: str) -> dict[str, Any]:
    """A configuration of the same method and verifier whose only drafter is the target."""
    kept = ("num_speculative_tokens", "verifier", "rejection_sample_method")
    found = {key: config[key] for key in kept if key in config}
    found.setdefault("num_speculative_tokens", 4)
    if config.get("method") == "hsd":
        return {"method": "hsd", **found, "levels": [{"model": model}], "adaptive": False}
    return {
        "method": "draft_model",
        "model": model,
        "draft_sample_method": "probabilistic",
        **found,
    }


def _equal_drafter(
    verification: Verification, arguments: dict[str, Any], prompts: list[list[int]]
) -> tuple[int, int]:
    """(drafted, accepted) tokens of one batch at most."""
    comparison = verification.comparison
    config = comparison.configs[1]
    assert config is not None
    config = equal_drafter_config(config, comparison.model)
    with _loaded(comparison, "equal drafter", arguments | {"speculative_config": config}) as engine:
        settings = verification.settings or [Setting(1.0)]
        count = min(verification.num_tokens, BATCH_SIZE * ANSWER_TOKENS // len(settings))
        plan = sampled.planned(prompts, settings, count, ANSWER_TOKENS)
        texts = sampled.generate(engine, plan, BATCH_SIZE, progress)
    return texts.drafted, texts.accepted


def _loaded(
    comparison: Comparison,
    name: str,
    arguments: dict[str, Any],
    environment: dict[str, str] | None = None,
) -> EngineProcess:
    progress(f"loading the engine: {name}")
    log = comparison.output / "logs" / f"{name.replace(' ', '_')}.log"
    return EngineProcess(arguments, f"'{name}'", log=log, environment=environment)


def _greedy(engine: EngineProcess, prompts: list[list[int]]) -> Generation:
    params = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return engine.generate(prompts, params)
