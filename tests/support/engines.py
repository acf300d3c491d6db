"""vLLM engines for tests: `vllm_hsd.tools.engine` with tiny defaults, jobs and patches.

Processes are forked from a server that has imported vLLM, which saves the import at each start.
No two engines share a process.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import pkgutil
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

from vllm_hsd.errors import UserError
from vllm_hsd.tools.engine import EngineProcess, vllm_params
from vllm_hsd.tools.worker_process import WorkerProcess

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # vLLM compiles one function of its log-probabilities even if eager: a second for each engine.
    "TORCHDYNAMO_DISABLE": "1",
}
ENGINE_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "seed": 0,
    # All of which draft.
    "max_num_seqs": 64,
    # Zeroing 1 GiB takes longer than loading a tiny model.
    "kv_cache_memory_bytes": 64 << 20,
}
LOG_CHARACTERS, MAX_STEPS = 6000, 2000
# Variable: proposals of which the host reads nothing, by fixed schedules, on a CPU too.
AS_ON_GPUS = "HSD_AS_ON_GPUS"
PROPOSALS = RECURSION, FIXED_SCHEDULE = "recursion", "fixed schedule"

PROMPTS = [[(7 * i + j * j) % 60 + 2 for j in range(3 + 9 * i)] for i in range(4)]
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


def run_engine(
    engine: dict,
    jobs: dict[str, dict],
    *,
    patch: str | None = None,
    env=None,
    forks: bool = True,
    work=None,
) -> dict:
    """Start an engine, run the jobs one after the other, and return name -> result of `run_job`.

    Args:
        engine: arguments of `vllm.LLM` in addition to ENGINE_DEFAULTS.
        jobs: name -> {"prompts": [token ids, or vLLM's mapping], "params": mapping or list of
            mappings, and optionally "arrive": [engine step], "abort": {request: engine step}}, or
            "adapters": [directory of a LoRA adapter or None].
        patch: "module:function", called in the process before the engine starts; or several, as
            in "module:function+function module:function".
        env: environment variables in addition to ENVIRONMENT.
        forks: False: a new process, whose libraries read `env` at import.
        work: called with the engine and the jobs in the place of `run_jobs`.
    """
    with started(engine, patch=patch, env=env, forks=forks) as process:
        return process.call(work or run_jobs, jobs)


@contextlib.contextmanager
def started(
    engine: dict, *, patch: str | None = None, env=None, forks: bool = True
) -> Iterator[EngineProcess]:
    """The process of an engine, which loads with the first call; arguments as for `run_engine`."""
    options = forked(env) if forks else {"environment": {**ENVIRONMENT, **(env or {})}}
    options["prepare"] = functools.partial(prepare, patch, AS_ON_GPUS in os.environ)
    engine = {**ENGINE_DEFAULTS, **engine}
    with logged() as log, EngineProcess(engine, log=log, **options) as process:
        yield process


def configure(family, speculative_config: dict | None, **engine):
    """vLLM's configuration for the family's target, made in this process."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_hsd.plugin import register

    register()
    return EngineArgs(
        model=family.target,
        skip_tokenizer_init=True,
        speculative_config=speculative_config,
        **engine,
    ).create_engine_config()


def configuration_errors(engines: list[dict], *, patch: str | None = None) -> list[str | None]:
    """ "ExceptionType: message" for each engine's arguments, None where vLLM accepts them."""
    return in_process(_configure, {"engines": engines}, patch)


def in_process(work, arguments: dict, patch: str | None = None, env: dict | None = None):
    """`work(**arguments)`, called in a process of the fork server; both must be picklable."""
    options = {**forked(env), "prepare": functools.partial(prepare, patch)}
    with logged() as log, WorkerProcess(log=log, **options) as process:
        return process.call(work, **arguments)


def forked(env: dict | None = None) -> dict:
    """Options of `WorkerProcess` for a process of the server that has imported vLLM."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["support.preloaded"])
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    # The server finds `support` by this variable only.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        forkserver.ensure_running()
    return {"start_method": "forkserver", "environment": {**ENVIRONMENT, **(env or {})}}


@contextlib.contextmanager
def logged() -> Iterator[Path]:
    """A process's log; its failure is raised with the end of that."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        try:
            yield log
        except UserError as error:
            tail = log.read_text(errors="replace")[-LOG_CHARACTERS:]
            raise RuntimeError(f"{error}\n{tail}") from error


def prepare(patch: str | None, as_on_gpus: bool = False) -> None:
    """Called in an engine's process before it starts."""
    # vLLM unfreezes and collects all objects at the end of an engine, which is that of its process.
    gc.unfreeze = lambda: None
    if as_on_gpus:
        from vllm_hsd.config import platform

        platform.read_on_host = lambda: False
    for part in (patch or "").split():
        module, _, functions = part.partition(":")
        for function in functions.split("+"):
            pkgutil.resolve_name(f"{module}:{function}")()


def run_jobs(llm, jobs: dict[str, dict]) -> dict[str, dict]:
    """Name -> result of `run_job`, one job after the other."""
    return {name: run_job(llm, **job) for name, job in jobs.items()}


def _configure(engines: list[dict]) -> list[str | None]:
    from vllm.engine.arg_utils import EngineArgs

    errors: list[str | None] = []
    for engine in engines:
        try:
            EngineArgs(**{**ENGINE_DEFAULTS, **engine}).create_engine_config()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append(None)
    return errors


def alike(one: object, other: object, tolerance: float = 1e-4) -> bool:
    """Whether outputs are equal but for the last digits of their log-probabilities."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or abs(one - other) < tolerance
    if isinstance(one, dict) and isinstance(other, dict):
        same = one.keys() == other.keys()
        return same and all(alike(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(alike(a, b, tolerance) for a, b in pairs)
    return one == other


def ids(result: dict) -> list[list[int]]:
    """Tokens of the requests of a job's result, of the first sequence of each."""
    return [output[0]["ids"] for output in result["outputs"]]


def differing(results: dict, plain: dict) -> list[tuple[str, int]]:
    """(job, request) of requests that ended in `plain` and have another output in `results`."""
    return [
        (name, i)
        for name, result in results.items()
        for i, (got, wanted) in enumerate(
            zip(result["outputs"], plain[name]["outputs"], strict=True)
        )
        if wanted and wanted[0]["finish"] and not alike(got, wanted)
    ]


def run_job(llm, prompts, params, arrive=None, abort=None, adapters=None) -> dict:
    """One job: {"outputs": [per prompt [per sequence {...}]], "levels": ..., "counters": ...}.

    "prompt_logprobs" has a list per prompt, None where the request did not ask.
    """
    from vllm_hsd.tools.level_metrics import counted_since, level_counts

    levels, counters = level_counts(), _counters(llm)
    listed = params if isinstance(params, list) else [params] * len(prompts)
    requests = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    if arrive is None and abort is None:
        sampling = [sampling_params(llm, given) for given in listed]
        loras = adapters and _lora_requests(adapters)
        outputs = llm.generate(requests, sampling, use_tqdm=False, lora_request=loras)
    else:
        outputs, refused = _step_by_step(llm, requests, listed, arrive, abort)
        assert not refused, refused
    return {
        "outputs": [output and _plain(output.outputs) for output in outputs],
        "prompt_logprobs": [output and _logprobs(output.prompt_logprobs) for output in outputs],
        "levels": counted_since(levels),
        "counters": {name: value - counters[name] for name, value in _counters(llm).items()},
    }


def _lora_requests(adapters: list[str | None]) -> list:
    from vllm.lora.request import LoRARequest

    paths = sorted({path for path in adapters if path})
    return [path and LoRARequest(path, 1 + paths.index(path), path) for path in adapters]


def sampling_params(llm, given: dict):
    """`vllm.SamplingParams`; `given` may hold "bad_words_ids" and plain structured outputs."""
    given = dict(given)
    bad_words_ids = given.pop("bad_words_ids", None)
    params = vllm_params(llm, given)
    if bad_words_ids:
        # vLLM derives these from `bad_words` with a tokenizer, which these engines lack.
        params._bad_words_token_ids = bad_words_ids
    return params


def run_odd_jobs(llm, jobs: dict[str, dict]) -> dict[str, list]:
    """Name -> answers to a job's requests: [{"ids", "finish", "text"}] for the sequences of each.

    {"refused": message} where vLLM does not take a request; the others share a batch.
    """
    keys, found = ("ids", "finish", "text"), {}
    for name, job in jobs.items():
        requests = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        outputs, refused = _step_by_step(llm, requests, job["params"])
        found[name] = [
            {"refused": refused[i]}
            if i in refused
            else [{key: own[key] for key in keys} for own in _plain(output.outputs)]
            for i, output in enumerate(outputs)
        ]
    return found


def _step_by_step(llm, requests, params, arrive=None, abort=None) -> tuple[list, dict[int, str]]:
    """Outputs, and what vLLM says of the requests that it does not take.

    They join at engine step arrive[i] and are aborted before engine step abort[i].
    """
    engine, last, refused = llm.llm_engine, {}, {}
    arrive, abort = arrive or [0] * len(requests), abort or {}
    for step in range(MAX_STEPS):
        if step > max(arrive) and not engine.has_unfinished_requests():
            return [last.get(i) for i in range(len(requests))], refused
        for i, request in enumerate(requests):
            if arrive[i] == step:
                try:
                    engine.add_request(str(i), request, sampling_params(llm, params[i]))
                except Exception as error:
                    refused[i] = f"{type(error).__name__}: {error}"[:200]
            if abort.get(i) == step:
                engine.abort_request([str(i)])
        for output in engine.step():
            i = int(output.request_id)
            # Of a request with several sequences, those that are new in this step.
            known = {own.index: own for own in last[i].outputs} if i in last else {}
            known |= {own.index: own for own in output.outputs}
            output.outputs = [known[index] for index in sorted(known)]
            last[i] = output
    raise RuntimeError(f"not finished after {MAX_STEPS} steps")


def _plain(sequences) -> list[dict]:
    return [
        {
            "ids": list(sequence.token_ids),
            "finish": sequence.finish_reason,
            "stop": sequence.stop_reason,
            "text": sequence.text,
            "logprobs": _logprobs(sequence.logprobs),
        }
        for sequence in sequences
    ]


def _logprobs(positions) -> list[dict | None] | None:
    """[per position {token: (log-probability, rank)}]; a text's first token has none."""
    return positions and [
        position and {token: (entry.logprob, entry.rank) for token, entry in position.items()}
        for position in positions
    ]


def _counters(llm) -> dict[str, float]:
    names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "num_preemptions")
    names += ("spec_decode_num_accepted_tokens", "prefix_cache_hits", "external_prefix_cache_hits")
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: found.get(f"vllm:{name}", 0) for name in names}
