"""Parameters of tests that are slow."""

import pytest


def slow(*values) -> list:
    """Values of one parameter, each of which `make test-slow` alone tries."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
