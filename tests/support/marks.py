"""Parameters of tests that are slow, and tests that are items of the proof on a GPU."""

import os
from collections.abc import Collection

import pytest
import torch

from benchmarks.gpu import items

# The proof's toy form runs on a CPU, by kernels that are compiled for it.
TOY = not torch.cuda.is_available() and items.TOY in os.environ
DEVICE = "cpu" if TOY else "cuda"
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TOY and not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_graphs = pytest.mark.skipif(TOY, reason="a CPU has no CUDA graphs")


def slow(*values) -> list:
    """Values of one parameter, each of which `make test-slow` alone tries."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_but(fast: Collection[tuple], cases: Collection[tuple]) -> list:
    """Cases of several parameters, of which `make test` tries those in `fast`."""
    return [pytest.param(*c, marks=[] if c in fast else pytest.mark.slow) for c in cases]
