from benchmarks.gpu.items import CannotRun, Finding, Setting


def run(setting: Setting) -> Finding:
    raise CannotRun("vLLM is not installed.")
