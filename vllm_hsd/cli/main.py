"""The command `vllm-hsd`."""

from __future__ import annotations

import argparse
import sys

from vllm_hsd.cli import build
from vllm_hsd.cli import plan as planner
from vllm_hsd.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit status, 2 for errors of the user's making."""
    parser = argparse.ArgumentParser(
        prog="vllm-hsd", description="Hierarchical speculative decoding for vLLM."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    demo = commands.add_parser(
        "demo", help="a cascade against one drafter and against none, on a tiny family of models"
    )
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser(
        "doctor", help="say whether method 'hsd' can run here, and what is wrong if not"
    )
    doctor.set_defaults(run=_doctor)
    planner.add_parsers(commands)
    build.add_parsers(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        return _fail(arguments, error)


def _doctor(arguments: argparse.Namespace) -> int:
    from vllm_hsd.cli import doctor

    return doctor.main()


def _demo(arguments: argparse.Namespace) -> int:
    from vllm_hsd.cli import demo
    from vllm_hsd.engine_runs import EngineError

    try:
        return demo.main()
    except (demo.DemoError, EngineError) as error:
        return _fail(arguments, error)


def _fail(arguments: argparse.Namespace, error: Exception) -> int:
    print(f"vllm-hsd {arguments.command}: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
