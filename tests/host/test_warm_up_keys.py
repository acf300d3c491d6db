"""What `BlockRejectionSampler.warm_up` compiles is what the steps of requests launch.

The CPU backend compiles for fewer keys than GPUs, so Triton's rule is written down here: types,
ones, multiples of 16, addresses of whole 16 bytes.
"""

import inspect

import pytest
import torch
from host.test_launch_cases import CASCADES
from support.table_runner import TableRunner, cascade, tables
from triton.runtime.jit import JITFunction

# One filtered request with a seed sends the whole batch through vLLM's processing.
PARAMS = [{"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.0}, {"seed": 1}, {}]
BATCHES = (PARAMS, PARAMS[1:2], [*PARAMS, {"seed": 1, "top_k": 2}])


def key(function, name: str, value):
    """What of an argument Triton's key holds."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    free = function.do_not_specialize or ()
    if type(value) is not int or name.isupper():
        return value
    return "integer" if name in free else (value == 1, value % 16 == 0)


@pytest.fixture
def launched(monkeypatch):
    """Keys of all launches from here on, by kernel; with something in the list they do not run."""
    found, idle, run = {}, [], JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        signature = inspect.signature(self.fn)
        given = {name: value for name, value in kwargs.items() if name in signature.parameters}
        bound = signature.bind(*args, **given).arguments
        if not self.fn.__module__.startswith("vllm."):
            form = tuple((name, key(self, name, value)) for name, value in bound.items())
            found.setdefault(self.fn.__name__, set()).add(form)
        if not idle:
            run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(JITFunction, "run", record)
    return found, idle


@pytest.mark.parametrize("name", (*CASCADES, "stock", "point masses"))
def test_a_step_launches_what_the_warm_up_has_compiled(launched, name):
    options = {"keeps_rows": name != "point masses"}
    if name in CASCADES:
        options |= {"prompt_length": 4, "cascade": cascade(name)}
    (found, idle), warm, served = launched, {}, {}

    def take(into: dict) -> None:
        for kernel, keys in found.items():
            into.setdefault(kernel, set()).update(keys)
        found.clear()

    for params in BATCHES:
        # As when an engine starts: no request has been there.
        runner = TableRunner(*tables(), [{}] * len(params), length=4, **options)
        found.clear()
        sampler = runner.runner.rejection_sampler
        sampler.warm_up(torch.float32, runner.drafter.draft_logits)
        take(warm)
        runner = TableRunner(*tables(), params, length=4, **options)
        propose = runner.propose

        def after_the_target(*num_tokens, propose=propose):
            take(served)
            # What is drafted changes no launch of the target's.
            idle.extend([True] * (name in CASCADES))
            propose(*num_tokens)
            idle.clear()
            found.clear()

        runner.propose = after_the_target
        for length in (4, 2):
            if name in CASCADES:
                runner.drafter.asked = length
            runner.step()
    missing = []
    for kernel, keys in served.items():
        compiled = set().union(*warm.get(kernel, ()))
        missing += [(kernel, sorted(set(k) - compiled, key=str)) for k in keys - warm[kernel]]
    assert served and not missing
