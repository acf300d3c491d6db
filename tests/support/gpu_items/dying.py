import os
import signal

from benchmarks.gpu.items import Finding, Setting


def run(setting: Setting) -> Finding:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
