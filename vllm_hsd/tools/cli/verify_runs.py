"""Runs of `vllm-hsd verify`: text with speculation, judged by the same model without."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from vllm_hsd.errors import UserError, brief
from vllm_hsd.tools import system
from vllm_hsd.tools.audit import sampled, seeded, self_test
from vllm_hsd.tools.audit.drafters import (
    OFFERS,
    Drafter,
    Drafters,
    drafters_of,
    keeps_seeds,
    short_name,
)
from vllm_hsd.tools.audit.load import Load
from vllm_hsd.tools.audit.other_servers import connect
from vllm_hsd.tools.audit.sampled import Setting
from vllm_hsd.tools.audit.servers import AT_ONCE, TOP_K, Server
from vllm_hsd.tools.audit.workloads import STEADY, WORKLOADS, Facts, Found, adapters_of
from vllm_hsd.tools.audit.workloads import run as serve
from vllm_hsd.tools.cli import bench, verify_report, verify_workloads
from vllm_hsd.tools.cli.bench_jobs import Comparison
from vllm_hsd.tools.cli.bench_runs import engine_arguments
from vllm_hsd.tools.cli.options import progress
from vllm_hsd.tools.cli.verify_report import ANSWER_TOKENS, LARGEST_GAP, Outcome, Verification
from vllm_hsd.tools.cli.verify_workloads import shares
from vllm_hsd.tools.engine import MAX_CPU_CACHE, EngineProcess
from vllm_hsd.tools.planner.prompts import refuse_sampling
from vllm_hsd.tools.worker_process import LOGS

# Requests of an engine at once, and those of sampled text: in small batches most is drafted.
BATCH_SIZE, SMALL_BATCH = 64, 8
# Tokens of every setting in the comparison of requests with seeds.
SEEDED_TOKENS = 1024
_THINKING = "reasoning_start_str", "reasoning_end_str"
# Seed of the uniforms that make quantiles continuous.
SEED = 0
# The engine without speculation is asked for a text's tokens one step after the other.
SCORER_ARGUMENTS = {"async_scheduling": False}
# Arguments of an engine that vLLM gives the target and not its drafter.
OF_THE_TARGET = {"code_revision", "hf_config_path", "hf_overrides", "quantization", "revision"}
NOT_RECORDED = (
    "What was drafted could not be recorded (that of several drafts of a request is not, nor that "
    "of vLLM's V1 runner), or nothing was: only models among the drafters were tested for leaning "
    "towards them."
)
NOT_NAMED = (
    "Whether tokens lean towards what was drafted was not tested, since the drafter is not known: "
    "name it with --drafter MODEL."
)
FILE = "verify.json"


def command(arguments: argparse.Namespace) -> int:
    """Run `vllm-hsd verify`.

    Returns:
        0 if nothing speaks against losslessness, 1 if something does, NOT_ENOUGH if too little was
        drafted to tell.
    """
    if arguments.self_test:
        bench.prepare_output(arguments.output)
        results = self_test.run(arguments.output, arguments.tokens, progress)
        print(verify_report.self_test_page(results))
        return 0 if all(result.as_expected for result in results) else 1
    outcome = run(parse(arguments))
    path = arguments.output / FILE
    verify_report.write(outcome, path)
    print(verify_report.page(outcome))
    print(f"Written: {path}")
    return outcome.status


def parse(arguments: argparse.Namespace) -> Verification:
    servers = _servers(arguments)
    for option in () if servers else ("model", "speculative_config"):
        if not getattr(arguments, option):
            raise UserError(f"--{option.replace('_', '-')} is missing.")
    temperatures = bench.temperatures(arguments)
    top_p = bench.in_order(arguments.top_p, "--top-p", 0)
    if not 0 < top_p[0] <= top_p[-1] <= 1:
        raise UserError("--top-p must be above 0 and at most 1.")
    arguments.model = arguments.model or ""
    comparison = bench.comparison_of(
        arguments,
        # A server's configuration is its own affair.
        [arguments.speculative_config or "{}"],
        batch_sizes=[BATCH_SIZE],
        temperatures=temperatures,
        max_tokens=ANSWER_TOKENS,
        num_prompts=1,
        rounds=1,
    )
    refuse_sampling(comparison.sampling)
    filters: dict[str, Any] = {"top_k": TOP_K} if servers else {}
    return Verification(
        comparison,
        [
            Setting(temperature, filters | ({} if p == 1 else {"top_p": p}))
            for temperature in temperatures
            if temperature > 0
            for p in top_p
        ],
        arguments.tokens,
        greedy=0 in temperatures,
        equal_drafter=arguments.equal_drafter,
        as_served=arguments.as_served,
        workloads=verify_workloads.chosen(arguments.workload),
        servers=servers,
        drafter=arguments.drafter,
        adapters=tuple(arguments.adapters),
    )


def judged_dtype(given: str) -> str:
    """By whose rounding texts are judged; bfloat16 for "auto", of a server, which does not say.

    Raises:
        UserError: no rounding is known for it.
    """
    dtype = {"auto": "bfloat16", "float": "float32", "half": "float16"}.get(given, given)
    if dtype not in LARGEST_GAP:
        raise UserError(f"--dtype {dtype}: rounding is known for {', '.join(LARGEST_GAP)}.")
    return dtype


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
    if arguments.speculative_config or arguments.equal_drafter or arguments.adapters:
        raise UserError(
            "--url verifies a running server: leave out --speculative-config, --equal-drafter and "
            "--adapters."
        )
    if arguments.engine_args != "{}" and not arguments.drafter:
        raise UserError("--engine-args are those of --drafter: name one, or leave them out.")
    return arguments.url, arguments.plain_url


@dataclass(frozen=True)
class Sides:
    """What answers with speculation and what judges it, engines that load when entered or servers.

    Attributes:
        prompts: token ids.
        arguments: of an engine that serves one model without speculation.
    """

    comparison: Comparison
    speculating: AbstractContextManager[Any]
    plain: AbstractContextManager[Any]
    drafters: Drafters
    prompts: list[list[int]]
    arguments: dict[str, Any]
    metadata: dict[str, Any]


def _engines(verification: Verification) -> Sides:
    comparison, setup = bench.prepare(verification.comparison, FILE)
    given = engine_arguments(comparison, setup, 1)
    # What many servers do, and a comparison of times must not.
    caching = {"enable_prefix_caching": True, **comparison.engine_args}
    arguments = given | _thinking(verification, given) | _adapters(verification, given)
    config = comparison.configs[1] or {}
    scorer = arguments | SCORER_ARGUMENTS
    return Sides(
        comparison,
        _loaded(comparison, "speculation", arguments | caching | {"speculative_config": config}),
        _loaded(comparison, "no speculation", scorer),
        drafters_of(config),
        setup.prompt_ids,
        arguments,
        bench.describe(comparison, setup),
    )


def _thinking(verification: Verification, arguments: dict[str, Any]) -> dict[str, Any]:
    """What lets an engine end thinking, with strings of one token where there are."""
    asked = "thinking" in verification.workloads and not arguments.get("skip_tokenizer_init")
    if not asked or "reasoning_config" in arguments or "reasoning_parser" in arguments:
        return {}
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(arguments.get("tokenizer", arguments["model"]))
    except Exception:  # transformers raises many kinds; vLLM knows tokenizers that it does not
        return {}
    for pair in (("<think>", "</think>"), ("^", "~")):
        if all(len(tokenizer.encode(each, add_special_tokens=False)) == 1 for each in pair):
            return {"reasoning_config": dict(zip(_THINKING, pair, strict=True))}
    return {}


def _adapters(verification: Verification, arguments: dict[str, Any]) -> dict[str, Any]:
    """What lets an engine serve all adapters and the model itself in one batch."""
    if not verification.adapters:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = []
    for directory in verification.adapters:
        try:
            ranks.append(int(json.loads(Path(directory, "adapter_config.json").read_text())["r"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"--adapters {directory} is no LoRA adapter ({brief(error)}): name a directory "
                "with adapter_config.json."
            ) from None
    found = {
        "enable_lora": True,
        # On a CPU vLLM 0.32 gives requests without an adapter the last slot's.
        "max_loras": len(ranks) + 1,
        "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= max(ranks)),
    }
    return {key: value for key, value in found.items() if key not in arguments}


def _running(verification: Verification, urls: tuple[str, str]) -> Sides:
    comparison = verification.comparison
    bench.prepare_output(comparison.output, FILE)
    at_once = AT_ONCE if verification.as_served else SMALL_BATCH
    speculating = connect("--url", urls[0], comparison.model, at_once)
    plain = connect("--plain-url", urls[1], comparison.model)
    if speculating.model != plain.model:
        raise UserError(
            f"--url serves '{speculating.model}', --plain-url '{plain.model}': give one model."
        )
    prompts = [plain.token_ids(prompt) for prompt in comparison.prompts]
    # A drafter's context may be shorter than the target's: vLLM takes what fits into its memory.
    arguments = {"max_model_len": -1, **comparison.base_args}
    if not torch.cuda.is_available() and "gpu_memory_utilization" not in arguments:
        arguments = {"kv_cache_memory_bytes": MAX_CPU_CACHE, **arguments}
    name = verification.drafter
    return Sides(
        replace(comparison, model=plain.model),
        contextlib.nullcontext(speculating),
        contextlib.nullcontext(plain),
        Drafters((Drafter(short_name(name), name),) if name else ()),
        prompts,
        arguments,
        {
            "model": plain.model,
            "dtype": judged_dtype(comparison.engine_args["dtype"]),
            "machine": "that of the servers",
            "versions": {**system.versions(), "server": speculating.version()},
            "max_tokens": ANSWER_TOKENS,
        },
    )


def run(verification: Verification) -> Outcome:
    """Generate with speculation, then judge it by the same model without.

    Raises:
        UserError: the model or the configuration cannot be used, or an engine or server failed.
    """
    urls, settings = verification.servers, verification.settings
    sides = _running(verification, urls) if urls else _engines(verification)
    comparison, drafters, prompts = sides.comparison, sides.drafters, sides.prompts
    dtype, config = judged_dtype(sides.metadata["dtype"]), comparison.configs[1] or {}
    names = verification.workloads
    steady_tokens, other_tokens = shares(names, verification.num_tokens, len(settings))
    sampled.refuse_coarse(dtype, settings)
    seconds = dict[str, float]()
    untested: list[str] = []
    greedy = found_greedy = with_seeds = found_seeded = None
    served: list[Found] = []
    recording: dict[str, Any] = {
        "offers": OFFERS if drafters.recorded else None,
        "certain": drafters.certain,
    }
    with _timed(seconds, "speculation"), sides.speculating as engine:
        if verification.greedy:
            asked = prompts[:BATCH_SIZE]
            count = len(asked) * ANSWER_TOKENS
            plan = sampled.planned(asked, [Setting(0.0)], count, ANSWER_TOKENS, seeded=0)
            greedy = sampled.generate(engine, plan, BATCH_SIZE, progress)
        seeds = not urls and keeps_seeds(config)
        if settings and seeds and STEADY in names:
            plan = sampled.planned(prompts, settings, SEEDED_TOKENS, ANSWER_TOKENS, seeded=1)
            with_seeds = sampled.generate(engine, plan, BATCH_SIZE, progress)
        if settings and not urls and not verification.as_served:
            engine.call("vllm_hsd.tools.audit.load:apply", Load(SMALL_BATCH, fixed_lengths=True))
        # The rule of requests with seeds is compared exactly.
        one_in = 0 if with_seeds else 2
        texts = sampled.generate(
            engine,
            sampled.planned(prompts, settings, steady_tokens, ANSWER_TOKENS, one_in),
            BATCH_SIZE,
            progress,
            **recording,
        )
        facts = Facts()
        if not urls:
            facts = engine.call(
                "vllm_hsd.tools.audit.workloads:facts_of", texts.token_ids or prompts
            )
            facts = replace(facts, adapters=verification.adapters)
        for name in names:
            if name == STEADY:
                continue
            if (lack := WORKLOADS[name].lacks(facts)) is not None:
                untested.append(f"{name}: not tested, since {lack}.")
                continue
            kinds = verification.greedy, seeds
            arguments = engine, facts, prompts, settings, other_tokens, kinds
            fixed = not verification.as_served
            served.append(serve(name, *arguments, fixed, progress, **recording))
        if unserved := set(verification.adapters) - adapters_of(served):
            missing = ", ".join(sorted(unserved))
            untested.append(f"Adapters that nothing was asked of, for want of --tokens: {missing}.")
        if isinstance(engine, Server) and engine.doubt:
            untested.append(engine.doubt)
    every = [texts, *(each.drawn for each in served)]
    if settings and drafters.recorded and not any(OFFERS in each.rows for each in every):
        untested.append(NOT_RECORDED)
    if settings and urls and not drafters.models:
        untested.append(NOT_NAMED)
    for drafter in drafters.models if settings else ():
        if (drafter.model, drafter.temperature_scale) == (comparison.model, 1):
            untested.append(f"{drafter.name} is the target itself: nothing can lean to it.")
            continue
        name, scale = f"drafter {drafter.name}", drafter.temperature_scale
        # Those that are given next to --url are the drafter's.
        other = set() if urls else OF_THE_TARGET
        reading = {key: value for key, value in sides.arguments.items() if key not in other}
        reading |= SCORER_ARGUMENTS | dict(drafter.keys)
        # Its context may be shorter than what the target was asked.
        reading |= {"model": drafter.model, "max_model_len": -1}
        loaded = _loaded(comparison, name, reading)
        with _timed(seconds, name), loaded as engine:
            for each in every:
                sampled.add_drafter(engine, each, drafter.name, scale, BATCH_SIZE, progress)
    with _timed(seconds, "no speculation"), sides.plain as engine:
        bound = LARGEST_GAP[dtype]
        if greedy is not None:
            found_greedy = seeded.compared(engine, greedy, bound)
        if with_seeds is not None:
            found_seeded = seeded.compared(engine, with_seeds, bound)
        ranges = [sampled.scored(engine, each, BATCH_SIZE, progress) for each in every]
        for own in served:
            if own.exact.prompts:
                own.compared = seeded.compared(engine, own.exact, bound)
    checks = [
        check
        for number, (each, own) in enumerate(zip(every, ranges, strict=True))
        if each.num_tokens
        for check in sampled.checks(each, own, dtype, SEED + number)
    ]
    return Outcome(
        replace(verification, comparison=comparison),
        sides.metadata,
        texts,
        checks,
        seconds,
        untested,
        _equal_drafter(verification, sides) if verification.equal_drafter else None,
        greedy,
        found_greedy,
        found_seeded,
        served,
    )


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    progress(f"starting: {name}")
    began = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - began


def _equal_drafter(verification: Verification, sides: Sides) -> tuple[int, int]:
    """(drafted, accepted) tokens of one batch at most, where the only drafter is the target."""
    comparison = sides.comparison
    given, model = comparison.configs[1] or {}, comparison.model
    kept = ("num_speculative_tokens", "verifier", "rejection_sample_method")
    config = {"num_speculative_tokens": 4, **{key: given[key] for key in kept if key in given}}
    if given.get("method") == "hsd":
        own: dict[str, Any] = {"method": "hsd", "levels": [{"model": model}], "adaptive": False}
    else:
        own = {"method": "draft_model", "model": model, "draft_sample_method": "probabilistic"}
    arguments = sides.arguments | {"speculative_config": own | config}
    with _loaded(comparison, "equal drafter", arguments) as engine:
        settings = verification.settings or [Setting(1.0)]
        count = min(verification.num_tokens, BATCH_SIZE * ANSWER_TOKENS // len(settings))
        plan = sampled.planned(sides.prompts, settings, count, ANSWER_TOKENS)
        texts = sampled.generate(engine, plan, BATCH_SIZE, progress)
    return texts.drafted, texts.accepted


def _loaded(comparison: Comparison, name: str, arguments: dict[str, Any]) -> EngineProcess:
    log = comparison.output / LOGS / f"{name.replace(' ', '_')}.log"
    return EngineProcess(arguments, f"'{name}'", log=log)
