"""Child processes that call functions on request.

Whatever a child prints goes to a log. A caller's functions run inside of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vllm_hsd.errors import UserError
from vllm_hsd.tools import system

# Seconds that a process has to end by itself.
GRACE_PERIOD = 20
# Directory next to a command's results; its next run removes what is in there.
LOGS = "engine-logs"
# Characters of vLLM's own words in an error message.
QUOTED = 200


class WorkerProcess:
    """A child process that calls functions on request; use it as a context manager.

    Args:
        name: what error messages call it.
        log: file that everything the process prints is appended to; None discards it.
        environment: variables to set in addition to `engine_environment`.
        prepare: called in the process before anything else, for example to patch a module.
        start_method: "spawn"; or "forkserver" for callers that start many processes and have
            told `multiprocessing` what to preload.
    """

    def __init__(
        self,
        name: str = "worker",
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], object] | None = None,
        start_method: str = "spawn",
    ) -> None:
        self.name, self.log = name, log
        self._environment = engine_environment() | dict(environment or {})
        self._prepare = prepare
        self._context = multiprocessing.get_context(start_method)

    def __enter__(self) -> Self:
        if self.log is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        self._pipe, theirs = self._context.Pipe()
        log = str(self.log or os.devnull)
        self._process: Any = self._context.Process(  # type: ignore[attr-defined]  # any context has it
            target=_serve, args=(theirs, log, self._environment, self._prepare)
        )
        # LD_PRELOAD counts only if it is set before the process starts.
        with _environment(self._environment):
            self._process.start()
        theirs.close()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(at_once=exception[0] is not None)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, called in the process; all must be picklable.

        Raises:
            UserError: the function raised (its traceback is a note), or the process died; says why
                and where the log is.
        """
        self._send(function, args, kwargs)
        return self._receive("failed")

    def close(self, at_once: bool = False) -> None:
        """End the process, by force if it takes long or `at_once`."""
        self._pipe.close()
        self._process.join(timeout=0 if at_once else GRACE_PERIOD)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ended_by(self, number: signal.Signals) -> bool:
        """Whether a signal has ended the process: SIGKILL is the system's where memory is short."""
        return bool(self._process.exitcode == -number)

    def _send(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        # A dead process is reported by the read that follows.
        with contextlib.suppress(BrokenPipeError):
            self._pipe.send((function, args, kwargs))

    def _receive(self, failed: str, on_message: Callable[[Any], object] | None = None) -> Any:
        try:
            succeeded, answer = self._pipe.recv()
            while succeeded is None and on_message is not None:
                on_message(answer)
                succeeded, answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode or 0
            status = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            hint = '; try dtype "float32"' if -code == signal.SIGILL else ""
            raise self._error(f"ended early with {status}{hint}") from None
        if succeeded:
            return answer
        reason, trace = answer
        error = self._error(f"{failed}: {reason}")
        error.add_note(f"Traceback of the process:\n{trace}")
        raise error

    def _error(self, reason: str) -> UserError:
        hint = f" (log: {self.log})" if self.log is not None else ""
        return UserError(f"{self.name} {reason.rstrip('.')}{hint}.")


def engine_environment() -> dict[str, str]:
    """Environment variables of a process that runs an engine inside itself."""
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    openmp, preloaded = system.openmp(), os.environ.get("LD_PRELOAD", "")
    if openmp and "libiomp5" not in preloaded:
        environment["LD_PRELOAD"] = f"{openmp}:{preloaded}".rstrip(":")
    return environment


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# What follows runs in the child process.

_parent: Any = None
# Closed when the parent closes the pipe.
at_end = contextlib.ExitStack()


def _serve(
    pipe: Any, log: str, environment: dict[str, str], prepare: Callable[[], object] | None
) -> None:
    """Answer calls until the parent closes the pipe or dies."""
    global _parent
    _parent = pipe
    # Ctrl-C reaches the whole process group; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    # A process of a fork server does not see the parent's changes.
    os.environ.update(environment)
    if prepare is not None:
        prepare()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            message = pipe.recv_bytes()
            try:
                function, args, kwargs = pickle.loads(message)
                answer = pickle.dumps((True, function(*args, **kwargs)))
            except Exception as error:
                traceback.print_exc()
                answer = pickle.dumps((False, (reason_of(error), traceback.format_exc())))
            pipe.send_bytes(answer)
    with contextlib.suppress(Exception):
        at_end.close()


def of_processes(measure: Callable[[Any], Any], pid: int | None = None) -> dict[int, Any]:
    """What a function says of a `psutil.Process` and of those that it started, by pid.

    Args:
        measure: called with each that has not ended.
        pid: of the first one; None: of this process.
    """
    # A host that proves kernels alone need not have it.
    import psutil

    first, found = psutil.Process(pid), {}
    for each in [first, *first.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                found[each.pid] = measure(each)
    return found


def send_to_parent(answer: Any) -> None:
    """Give `answer` to the `on_message` of the call that runs."""
    _parent.send((None, answer))


def reason_of(error: Exception) -> str:
    """An exception's message on one line of at most QUOTED characters."""
    text = str(error)
    if hasattr(error, "errors") and (listed := error.errors()):  # pydantic's ValidationError
        text = listed[0]["msg"].removeprefix("Value error, ")
    text = " ".join(text.split()) or type(error).__name__
    return text if len(text) <= QUOTED else text[: QUOTED - 1] + "…"
