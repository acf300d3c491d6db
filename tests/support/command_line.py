"""The commands as a user calls them."""

from vllm_hsd.tools.cli.main import main


def run(*arguments):
    """Exit status of `vllm-hsd ARGUMENTS`."""
    return main([str(argument) for argument in arguments])


def refused(capsys, command, *arguments):
    """The last sentence of `vllm-hsd COMMAND ARGUMENTS` on its way out with status 2."""
    assert run(*command.split(), *arguments) == 2
    name, said = capsys.readouterr().err.strip().splitlines()[-1].split(": ", 1)
    assert name == f"vllm-hsd {command}" and said.endswith(".")
    return said
