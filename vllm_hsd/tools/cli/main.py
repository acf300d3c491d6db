"""The command `vllm-hsd`."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Any

from vllm_hsd import __version__
from vllm_hsd.errors import UserError
from vllm_hsd.tools.cli import advise, bench, build, doctor, plan, verify

EPILOG = """\
exit status:
  0    done
  1    `doctor` found a problem, a configuration of `bench` could not run or changed greedy
       text beyond near ties, or `verify` found that a configuration is not lossless
  2    wrong arguments or input; one line on stderr says which and what to do
  3    `verify` found nothing, but too little was drafted to call that a pass
  4    an error of this package, whose traceback is on stderr
  130  interrupted
"""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except where there is none, and keeps the lines of an epilog."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required or action.default is None or action.default is False:
            return action.help
        if action.default in ([], {}):
            return action.help
        return super()._get_help_string(action)


class CommandParser(argparse.ArgumentParser):
    """Parser of a command; `arguments.command` is its full name."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(**options)
        self.set_defaults(command=self.prog)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status.

    Every function of the commands may raise `UserError`, whose sentences are printed here.
    """
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        for sentence in error.args:
            print(f"{arguments.command}: {sentence}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{arguments.command}: interrupted", file=sys.stderr)
        return 130
    except Exception:
        # 1, as Python has it, would be a verdict.
        traceback.print_exc()
        return 4


def make_parser() -> CommandParser:
    """The parser of all commands; making it imports neither torch nor vLLM."""
    parser = CommandParser(
        prog="vllm-hsd",
        description="Hierarchical speculative decoding for vLLM.",
        epilog=EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"vllm-hsd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    advise.add_parser(commands)
    bench.add_parser(commands)
    build.add_parser(commands)
    doctor.add_parser(commands)
    plan.add_parsers(commands)
    verify.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
