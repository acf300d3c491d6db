"""The planner's commands as a user calls them."""

import argparse

from vllm_hsd.cli.plan import add_parsers


def run(*arguments):
    """Exit status of `vllm-hsd ARGUMENTS`."""
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers(required=True))
    parsed = parser.parse_args([str(argument) for argument in arguments])
    return parsed.run(parsed)
