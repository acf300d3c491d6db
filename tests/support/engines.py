"""One vLLM engine in a process of its own: jobs in, plain data out.

The processes are forked from a server that has imported vLLM, which saves each of them the
import; no engine ever shares a process with another.
"""

import gc
import importlib
import json
import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
PRELOAD = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm_hsd.runner_v1.proposer",
]
ENGINE_DEFAULTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "seed": 0,
    # Zeroing vLLM's default of 1 GiB takes longer than loading a tiny model.
    "kv_cache_memory_bytes": 64 << 20,
}


def run_engine(engine: dict, jobs: dict[str, dict], *, patch: str | None = None, env=None) -> dict:
    """Start an engine, run the jobs one after the other, and return name -> result of `run_job`.

    Args:
        engine: arguments of `vllm.LLM` beside ENGINE_DEFAULTS.
        jobs: name -> {"prompts": [token ids], "params": mapping or list of mappings, and
            optionally "arrive": [engine step], "abort": {request: engine step}}.
        patch: "module:function" that is called before the engine starts.
        env: environment variables beside ENVIRONMENT.

    Raises:
        RuntimeError: the process failed; the message ends with its output.
    """
    return _in_process(_run, {"engine": engine, "jobs": jobs}, patch, env)


def configuration_errors(engines: list[dict], *, patch: str | None = None) -> list[str | None]:
    """What vLLM says to each of these arguments of an engine, None where it accepts them.

    No model is loaded. `patch` as for `run_engine`.
    """
    return _in_process(_configure, {"engines": engines}, patch, None)


def _in_process(work, arguments: dict, patch: str | None, env: dict | None):
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as scratch:
        result, log = Path(scratch, "result.json"), Path(scratch, "log")
        call = (work, arguments, patch, env or {}, str(result), str(log))
        process = context.Process(target=_main, args=call)
        process.start()
        process.join()
        if process.exitcode or not result.exists():
            raise RuntimeError(f"engine process exited with {process.exitcode}:\n{_tail(log)}")
        return json.loads(result.read_text())


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-6000:] if log.exists() else ""


def _main(work, arguments: dict, patch: str | None, env: dict, result: str, log: str) -> None:
    target = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.environ.update(env)
    # vLLM collects garbage nine times at start-up; most of the time goes to imported modules.
    gc.freeze()
    try:
        if patch:
            module, function = patch.split(":")
            getattr(importlib.import_module(module), function)()
        Path(result).write_text(json.dumps(work(**arguments)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # vLLM's own shutdown hooks are of no use to a process that ends here.
    os._exit(0)


def _run(engine: dict, jobs: dict) -> dict:
    from vllm import LLM

    llm = LLM(**{**ENGINE_DEFAULTS, **engine})
    try:
        return {name: run_job(llm, **job) for name, job in jobs.items()}
    finally:
        llm.llm_engine.engine_core.shutdown()


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


def run_job(llm, prompts, params, arrive=None, abort=None) -> dict:
    """{"outputs": [per prompt [per sequence {...}]], "levels", "counters"}: counts of this job."""
    levels, counters = _level_counts(), _counters(llm)
    listed = params if isinstance(params, list) else [params] * len(prompts)
    sampling = [_sampling_params(llm, given) for given in listed]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    if arrive is None and abort is None:
        outputs = llm.generate(requests, sampling, use_tqdm=False)
    else:
        outputs = _step_by_step(llm, requests, sampling, arrive or [0] * len(prompts), abort or {})
    return {
        "outputs": [_plain(output) for output in outputs],
        "levels": _difference(_level_counts(), levels),
        "counters": {name: value - counters[name] for name, value in _counters(llm).items()},
    }


def _sampling_params(llm, given: dict):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(given)
    bad_words_ids = given.pop("bad_words_ids", None)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if llm.model_config.skip_tokenizer_init:
        given.setdefault("detokenize", False)
    params = SamplingParams(**given)
    if bad_words_ids:
        # What vLLM makes of `bad_words` with the tokenizer that these engines do without.
        params._bad_words_token_ids = bad_words_ids
    return params


def _step_by_step(llm, requests, sampling, arrive, abort) -> list:
    """Requests join at engine step arrive[i] and are aborted before engine step abort[i]."""
    engine, last, step = llm.llm_engine, {}, 0
    while step <= max(arrive) or engine.has_unfinished_requests():
        for i in range(len(requests)):
            if arrive[i] == step:
                engine.add_request(str(i), requests[i], sampling[i])
            if abort.get(i) == step:
                engine.abort_request([str(i)])
        for output in engine.step():
            last[int(output.request_id)] = output
        step += 1
    return [last.get(i) for i in range(len(requests))]


def _plain(output) -> list[dict] | None:
    if output is None:
        return None
    return [
        {
            "ids": list(sequence.token_ids),
            "finish": sequence.finish_reason,
            "stop": sequence.stop_reason,
            "text": sequence.text,
            "logprobs": sequence.logprobs
            and [
                {token: [entry.logprob, entry.rank] for token, entry in position.items()}
                for position in sequence.logprobs
            ],
        }
        for sequence in output.outputs
    ]


def _level_counts() -> list[dict]:
    from vllm_hsd.runner_v1.metrics import level_counts

    return level_counts()


def _difference(after: list[dict], before: list[dict]) -> list[dict]:
    before = before or [dict.fromkeys(level, 0) for level in after]
    return [
        {name: value - earlier[name] for name, value in level.items()}
        for level, earlier in zip(after, before, strict=True)
    ]


def _counters(llm) -> dict[str, float]:
    names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "num_preemptions")
    names += ("spec_decode_num_accepted_tokens", "prefix_cache_hits")
    found = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {name: found.get(f"vllm:{name}", 0) for name in names}
