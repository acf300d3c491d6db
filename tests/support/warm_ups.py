"""What is compiled after an engine has started, and warm-ups that are left out."""

from support import adversarial_depth, engines


def run(llm, jobs: dict[str, dict]) -> dict[str, dict]:
    """As `engines.run_jobs`; "compiled" of a job: kernels and their constants."""
    from triton import knobs

    monitor, compiled = knobs.runtime.jit_post_compile_hook, []
    assert monitor is not None, "vLLM's monitor is not active"

    def noted(*, fn, compile, **_):
        constants = {
            fn.jit_function.arg_names[index[0]]: value
            for index, value in compile["constants"].items()
        }
        compiled.append((fn.name.rpartition(".")[2], constants))

    knobs.runtime.jit_post_compile_hook = noted
    results = {}
    for name, job in jobs.items():
        results[name] = {**engines.run_job(llm, **job), "compiled": compiled.copy()}
        compiled.clear()
    return results


def run_adversary(llm, jobs: dict[str, dict]) -> dict[str, dict]:
    """As `run`; levels and lengths change in every step, but did not when the engine started."""
    adversarial_depth.install()
    return run(llm, jobs)


def without() -> None:
    from vllm_hsd.host import cpu_warm_up

    cpu_warm_up.warmup_kernels = lambda *_: None
