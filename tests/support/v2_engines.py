"""Engines on vLLM's V2 runner, with kernels compiled for a CPU; see `support.engines` for jobs."""

import itertools
import os
from collections.abc import Callable
from functools import partial
from unittest import mock

from support import engines, triton_cpu
from support.exact_joint_distribution import chi_square_p_value, joint_distribution

from vllm_hsd.tools.engine import EngineProcess

# Variable: proposals of which the host reads nothing, on a CPU too.
AS_ON_GPUS = "HSD_AS_ON_GPUS"
ENVIRONMENT = {**engines.ENVIRONMENT, "VLLM_USE_V2_MODEL_RUNNER": "1"}
# Interpreted kernels cost milliseconds per row: few requests, small batches.
ENGINE_DEFAULTS = {"max_num_seqs": 8, "max_num_batched_tokens": 128}

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(3 + 9 * i)] for i in range(4)]
# Interpreted kernels cost milliseconds per row: few tokens.
GREEDY = {"temperature": 0, "max_tokens": 9, "ignore_eos": True}
JOBS = {
    "mixed": {
        "prompts": PROMPTS,
        "params": [
            GREEDY,
            {**GREEDY, "temperature": 0.7, "logprobs": 2},
            {**GREEDY, "temperature": 1},
            {**GREEDY, "temperature": 1.3},
        ],
    },
    "joining": {"prompts": PROMPTS, "params": GREEDY, "arrive": [0, 2, 3, 5]},
}

_FILTERED = (
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 1.2, "top_k": 12, "min_p": 0.02},
    {"temperature": 0.7, "presence_penalty": 0.5, "logprobs": 1},
)
_SEEDED = [{**GREEDY, "seed": 11 * i, **given} for i, given in enumerate(_FILTERED)]
# Sampled requests with seeds and filters, all at once and one by one.
SEEDED_JOBS = {
    "together": {"prompts": PROMPTS, "params": _SEEDED},
    "joining": {"prompts": PROMPTS, "params": _SEEDED, "arrive": [0, 2, 3, 5]},
}


def run_seeded(
    target: str, speculative_config: dict | None = None, patch: str | None = None
) -> tuple[dict[str, list[list[int]]], dict]:
    """Serve SEEDED_JOBS.

    Returns:
        (tokens of each request by job, counters of the first job).
    """
    engine = {"model": target, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    if speculative_config is not None:
        engine["speculative_config"] = speculative_config
    found = run_engine(engine, SEEDED_JOBS, patch=patch)
    texts = {job: engines.ids(result) for job, result in found.items()}
    return texts, found["together"]["counters"]


def run_greedy_and_mixed(target: str, speculative_config: dict, greedy: list[list[int]]) -> dict:
    """Check greedy tokens, of requests that join one by one and of one among sampled ones.

    Prompts are prefilled in chunks of 24 tokens at most.

    Returns:
        the result of a job with greedy and sampled requests in one batch.
    """
    engine = {"model": target, "max_num_batched_tokens": 24, "max_num_seqs": 4}
    results = run_engine({**engine, "speculative_config": speculative_config}, JOBS)
    assert engines.ids(results["joining"]) == greedy
    assert results["mixed"]["outputs"][0][0]["ids"] == greedy[0]
    return results["mixed"]


def p_values(
    target: str,
    speculative_config: dict,
    prompt: list[int],
    cases: dict[str, dict],
    *,
    count: int = 300,
    patch: str | None = None,
) -> dict[str, float]:
    """Case -> chi-square p-value of three sampled tokens against their joint distribution.

    Args:
        cases: name -> sampling parameters.
        count: texts of each case, without seeds.
    """
    jobs = {
        case: {
            "prompts": [prompt] * count,
            "params": {"max_tokens": 4, "ignore_eos": True, **params},
        }
        for case, params in cases.items()
    }
    # Tokens for drafts of all requests at once.
    engine = {"model": target, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
    engine["speculative_config"] = speculative_config
    results = run_engine(engine, jobs, patch=patch, short_matches=True)
    return {
        case: chi_square_p_value(
            [tuple(output[0]["ids"][:3]) for output in results[case]["outputs"]],
            joint_distribution(target, prompt, 3, params),
        )
        for case, params in cases.items()
    }


def check_samples(target: str, speculative_config: dict, prompt: list[int]) -> None:
    """Sampled text follows the target."""
    cases = {"temperature 1": {}, "top_p": {"top_p": 0.8}}
    found = p_values(target, speculative_config, prompt, cases)
    print(found)
    assert min(found.values()) > 1e-6, found


def check_wrong_rows(target: str, speculative_config: dict, prompt: list[int]) -> None:
    """Its negative control: wrong rows of the drafts; two tokens to choose from make it sharper."""
    patch, cases = "benchmarks.gpu.faults:install", {"top_k": {"top_k": 2}}
    found = p_values(target, speculative_config, prompt, cases, count=600, patch=patch)
    print(found)
    assert found["top_k"] < 1e-6


def run_engine(
    engine: dict,
    jobs: dict[str, dict],
    *,
    patch: str | None = None,
    env: dict[str, str] | None = None,
    work: Callable = engines.run_jobs,
    short_matches: bool = False,
) -> dict:
    """As `engines.run_engine`, on the V2 runner; with `AS_ON_GPUS` set, by fixed schedules.

    Args:
        env: further variables, which libraries may read at import: the process is spawned for them.
        short_matches: a suffix matches 3 tokens at most: each length is a program of its own, and
            they are interpreted one after another.
        work: called there with the engine and the jobs.
    """
    engine = {**engines.ENGINE_DEFAULTS, **ENGINE_DEFAULTS, **engine}
    prepare = partial(_prepare, patch, short_matches, AS_ON_GPUS in os.environ)
    options = {"environment": {**ENVIRONMENT, **env}} if env else engines.forked(ENVIRONMENT)
    options["prepare"] = prepare
    with engines.logged() as log, EngineProcess(engine, log=log, **options) as process:
        return process.call(work, jobs)


def run_compiled_jobs(llm, jobs: dict[str, dict]) -> dict:
    """The jobs with the model's own sampling parameters, and how many models were compiled."""
    from vllm.compilation.counter import compilation_counter

    own = llm.get_default_sampling_params()
    sampling = {key: getattr(own, key) for key in ("temperature", "top_k", "top_p")}
    for job in jobs.values():
        job["params"] = [{**sampling, **params} for params in job["params"]]
    results = engines.run_jobs(llm, jobs)
    return {**results, "sampling": sampling, "compiled": compilation_counter.num_models_seen}


def run_counted_jobs(llm, jobs: dict[str, dict]) -> dict:
    """The jobs, each with its "steps": passes of all levels, and tokens drafted for each request.

    In a job "forgotten" the cascade forgets after each step which texts its levels have missed.
    """
    from vllm_hsd.host.program_models import ProgramModel
    from vllm_hsd.host.speculator import CascadeSpeculator

    steps: list[dict] = []
    compute, propose, passes = ProgramModel.compute, CascadeSpeculator.propose, itertools.count()

    def counted(self, *args):
        next(passes)
        return compute(self, *args)

    def recorded(self, batch, *args, **kwargs):
        before = next(passes)
        drafts = propose(self, batch, *args, **kwargs)
        rows = self.state.row_of_slot[batch.idx_mapping[: batch.num_reqs].long()]
        drafted = self.state.draft_length[rows.clamp(min=0)] * (rows >= 0)
        step = {"prompts": bool(batch.has_prefill), "passes": next(passes) - before - 1}
        steps.append({**step, "drafted": drafted.tolist()})
        if name == "forgotten":
            self.stale[:] = False
        return drafts

    results = {}
    with (
        mock.patch.object(ProgramModel, "compute", counted),
        mock.patch.object(CascadeSpeculator, "propose", recorded),
    ):
        for name, job in jobs.items():
            results[name] = {**engines.run_job(llm, **job), "steps": steps.copy()}
            steps.clear()
    return results


def _prepare(patch: str | None, short_matches: bool, as_on_gpus: bool) -> None:
    triton_cpu.prepare_vllm()
    if as_on_gpus:
        from vllm_hsd.config import platform

        platform.read_on_host = lambda: False
    if short_matches:
        from vllm_hsd.cascade import suffix_lookup

        suffix_lookup.DEPTH = suffix_lookup.HEAD = 4
    engines.prepare(patch)
