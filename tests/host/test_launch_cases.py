"""What a runner launches against the launches that tests/kernels compiles."""

import inspect

import pytest
import torch
from support import kernel_launches, launch_cases
from support.table_runner import TableRunner, cascade, tables
from triton.runtime.jit import JITFunction

CASCADES = (
    "one",
    "three",
    "lookup",
    "bigram",
    "suffix",
    "sources",
    "choice below",
    "unverified",
    "entropy, unverified",
    "horizontal",
    "horizontal lookup",
    "n-grams",
    "n-grams above",
    "two, adaptive",
)
# What all cases launch, once in a process.
COVERED: set = set()


def form(name: str, value):
    """What decides which code is compiled, but for sizes."""
    if isinstance(value, torch.Tensor):
        # Logits of all dtypes take the same code.
        narrow = value.is_floating_point() and value.dtype != torch.float64
        return "floats" if narrow else value.dtype
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, 1) if name.isupper() else "number"
    return value if name.isupper() else type(value)


@pytest.fixture
def launched(monkeypatch):
    """Forms of all launches from here on; they run if the list "runs" is not empty."""
    found, runs, run = set(), [], JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        signature = inspect.signature(self.fn)
        given = {key: value for key, value in kwargs.items() if key in signature.parameters}
        bound = signature.bind(*args, **given).arguments
        if not self.fn.__module__.startswith("vllm."):
            found.add((self.fn.__name__, *(form(key, value) for key, value in bound.items())))
        if runs:
            run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(JITFunction, "run", record)
    return found, runs


def covered_by(launched, cases) -> set:
    found, _ = launched
    found.clear()
    launch_cases.launch(cases)
    return found.copy()


def served(launched, name: str) -> set:
    """Of a step with drafts and without, for requests of every kind."""
    found, runs = launched
    params = [{"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.0}, {"seed": 1}]
    options = {} if name == "stock" else {"prompt_length": 4, "cascade": cascade(name)}
    runner = TableRunner(*tables(), params, length=4, **options)
    found.clear()
    runs.append(True)
    for length in (4, 2, 0):
        if name != "stock":
            runner.drafter.asked = length
        runner.step()
    runs.clear()
    return found.copy()


@pytest.mark.parametrize("name", (*CASCADES, "stock"))
def test_what_runners_launch_is_compiled(launched, name):
    if not COVERED:
        COVERED.update(covered_by(launched, launch_cases.ALL))
    assert len(COVERED) > 32  # there are as many kernels
    assert served(launched, name) <= COVERED


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits * logits.sum().item(),
        lambda logits: -logits if logits.amax() > 0 else logits,
        lambda logits: logits[logits.amax(-1) > 0],
    ],
    ids=["a value", "a branch", "a shape"],
)
def test_a_read_on_the_host_is_caught(launched, monkeypatch, read):
    """Tensors of the cases have no values: what depends on one cannot be captured in a graph."""
    forward = kernel_launches._Level.forward
    monkeypatch.setattr(kernel_launches._Level, "forward", lambda *args: read(forward(*args)))
    with pytest.raises(RuntimeError, match="meta"):
        launch_cases.launch([kernel_launches.Cascade((3, 8))])


def test_a_launch_without_a_case_is_found(launched):
    """Negative control: no case has a level that passes drafts on."""
    cases = [case for case in launch_cases.ALL if not getattr(case, "unverified", ())]
    missing = served(launched, "unverified") - covered_by(launched, cases)
    assert {name for name, *_ in missing} == {"commit_unverified_kernel"}
