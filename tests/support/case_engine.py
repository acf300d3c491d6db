"""An engine that answers odd requests one case at a time and reports what it refused or raised."""

from support import engines

MAX_STEPS = 2000


def run_cases(engine: dict, cases: list[dict]) -> list[dict]:
    """Start one engine in its own process and run the cases one after the other.

    Args:
        engine: arguments of `vllm.LLM` in addition to the defaults of `support.engines`.
        cases: {"prompts": [token ids], "params": [mapping]}; the requests of a case share a batch.

    Returns:
        One mapping per case. "outputs": per request a list of {"ids", "finish", "text"}, or
        {"refused": message} where vLLM does not take the request. "raised": the first line of
        what the engine raised, None if nothing; the cases after it are not run.
    """
    return engines.in_process(answer_cases, {"engine": engine, "cases": cases})


def answer_cases(engine: dict, cases: list[dict]) -> list[dict]:
    """The work of the engine's process; see `run_cases`."""
    from vllm import LLM

    llm = LLM(**{**engines.ENGINE_DEFAULTS, "skip_tokenizer_init": False, **engine})
    found: list[dict] = []
    try:
        for number, case in enumerate(cases):
            found.append(_answer(llm, number, **case))
            if found[-1]["raised"]:
                break
    finally:
        llm.llm_engine.engine_core.shutdown()
    return found


def _answer(llm, number: int, prompts: list[list[int]], params: list[dict]) -> dict:
    engine, outputs = llm.llm_engine, []
    for i, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
        try:
            sampling = engines.sampling_params(llm, given)
            engine.add_request(f"{number}-{i}", {"prompt_token_ids": prompt}, sampling)
        except Exception as error:
            outputs.append({"refused": f"{type(error).__name__}: {error}"[:200]})
        else:
            outputs.append(None)
    raised, last, steps = None, {}, 0
    try:
        while engine.has_unfinished_requests():
            steps += 1
            if steps > MAX_STEPS:
                raise RuntimeError(f"not finished after {MAX_STEPS} steps")
            for output in engine.step():
                last[output.request_id] = output
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"[:300]
    for i, output in enumerate(outputs):
        if output is None and f"{number}-{i}" in last:
            outputs[i] = [
                {
                    "ids": list(sequence.token_ids),
                    "finish": sequence.finish_reason,
                    "text": sequence.text,
                }
                for sequence in last[f"{number}-{i}"].outputs
            ]
    return {"outputs": outputs, "raised": raised}
