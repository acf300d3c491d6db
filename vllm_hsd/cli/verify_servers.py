"""`vllm-hsd verify --url`: running servers instead of engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from vllm_hsd import host
from vllm_hsd.cli import greedy
from vllm_hsd.cli.bench_jobs import Comparison, Job, Results
from vllm_hsd.cli.bench_runs import MAX_CPU_CACHE, SPARE_TOKENS, progress
from vllm_hsd.cli.verify_results import ANSWER_TOKENS, LARGEST_GAP, SEED, Outcome, Verification
from vllm_hsd.engine import Generation
from vllm_hsd.errors import UserError
from vllm_hsd.lossless import sampled, servers
from vllm_hsd.lossless.drafters import Drafter, short_name
from vllm_hsd.lossless.sampled import Setting, Texts
from vllm_hsd.lossless.servers import TOP_K, Server
from vllm_hsd.planner.prompts import Prompt

AddDrafter = Callable[[Comparison, dict[str, Any], Drafter, Texts], None]
NOT_NAMED = (
    "Whether tokens lean towards what was drafted was not tested, since the drafter is not known: "
    "name it with --drafter MODEL."
)


def run_on_servers(
    verification: Verification, urls: tuple[str, str], add_drafter: AddDrafter
) -> Outcome:
    """Sample at the first server, and judge it by the second one.

    Args:
        add_drafter: `verify_runs.add_drafter`.

    Raises:
        UserError: a server cannot be reached or refuses, or they serve different models.
    """
    comparison = verification.comparison
    speculating, plain = Server("--url", urls[0]), Server("--plain-url", urls[1])
    models = [comparison.model or server.model() for server in (speculating, plain)]
    if models[0] != models[1]:
        raise UserError(f"--url serves '{models[0]}', --plain-url '{models[1]}': give one model.")
    model = models[0]
    # What a server computes in, it does not say.
    dtype = str(comparison.engine_args["dtype"])
    dtype = dtype if dtype in LARGEST_GAP else "bfloat16"
    comparison.output.mkdir(parents=True, exist_ok=True)
    settings = [
        Setting(each.temperature, {"top_k": TOP_K, **each.others}) for each in verification.settings
    ]
    verification = replace(
        verification, comparison=replace(comparison, model=model), settings=settings
    )
    prompts = _encoded(plain, model, comparison.prompts)
    results, seconds = Results(comparison), {}
    began = time.perf_counter()
    if verification.greedy:
        for config, server in enumerate((plain, speculating)):
            job = Job(config, 0, len(prompts), 0.0, 0, tuple(range(len(prompts))))
            results.generations[job] = _greedy(server, model, prompts)
        results.differences = [
            replace(each, gap=_gap(plain, model, each))
            for each in greedy.differences(results, prompts)
        ]
    texts = sampled.planned(prompts, settings, verification.num_tokens, ANSWER_TOKENS)
    servers.generate(speculating, model, texts, progress)
    seconds["speculation"] = time.perf_counter() - began
    untested = []
    if verification.drafter:
        began = time.perf_counter()
        name = verification.drafter
        own = replace(comparison, model=name, prompts=[])
        longest = max(map(len, prompts)) + ANSWER_TOKENS + SPARE_TOKENS
        arguments = {"max_model_len": longest, **own.base_args}
        if not torch.cuda.is_available():
            arguments = {"kv_cache_memory_bytes": MAX_CPU_CACHE, **arguments}
        add_drafter(own, arguments, Drafter(short_name(name), name), texts)
        seconds["drafter"] = time.perf_counter() - began
    elif settings:
        untested.append(NOT_NAMED)
    began = time.perf_counter()
    ranges = servers.score(plain, model, texts, progress)
    seconds["no speculation"] = time.perf_counter() - began
    return Outcome(
        verification,
        {
            "model": model,
            "dtype": dtype,
            "machine": "that of the servers",
            "versions": {**host.versions(), "server": speculating.version()},
            "max_tokens": ANSWER_TOKENS,
        },
        texts,
        sampled.checks(settings, texts, ranges, dtype, SEED),
        results,
        dtype,
        None,
        seconds,
        untested,
    )


def _encoded(plain: Server, model: str, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Token ids of the prompts; chats are plain text where the model has no chat template."""
    try:
        return [plain.token_ids(model, prompt) for prompt in prompts]
    except UserError as error:
        if "chat template" not in str(error):
            raise
        progress("the model has no chat template: prompts are plain text")
    texts = [prompt if isinstance(prompt, str) else prompt[0]["content"] for prompt in prompts]
    return [plain.token_ids(model, text) for text in texts]


def _greedy(server: Server, model: str, prompts: list[list[int]]) -> Generation:
    texts = Texts(prompts=list(prompts))
    params = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    texts.params = [dict(params) for _ in prompts]
    servers.generate(server, model, texts, progress)
    count = len(prompts)
    return Generation(
        texts.token_ids,
        [""] * count,
        0.0,
        0.0,
        [0.0] * count,
        [0.0] * count,
        [len(steps) for steps in texts.step_lengths],
    )


def _gap(plain: Server, model: str, each: greedy.Difference) -> float:
    if greedy.NONE in (each.expected, each.found):
        return each.gap
    return servers.gap(plain, model, each.context, each.expected, each.found)
