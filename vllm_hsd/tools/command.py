"""The command `vllm-hsd`, which a server's installation may lack the libraries of."""

from __future__ import annotations

import sys


def main() -> int:
    """As `cli.main.main`; a sentence on stderr and 2 where a library is missing."""
    try:
        # Its parts are imported late.
        import scipy  # noqa: F401

        from vllm_hsd.tools.cli.main import main as run
    except ModuleNotFoundError as error:
        print(
            f"vllm-hsd: {error.name} is not installed: install vllm-hsd with its extra [tools].",
            file=sys.stderr,
        )
        return 2
    return run()
