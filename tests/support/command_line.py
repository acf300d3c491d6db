"""The commands as a user calls them."""

from vllm_hsd.tools.cli.main import main


def run(*arguments):
    """Exit status of `vllm-hsd ARGUMENTS`."""
    return main([str(argument) for argument in arguments])
