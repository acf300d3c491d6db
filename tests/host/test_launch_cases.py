"""What a runner launches is compiled: for GPUs by tests/kernels, before it serves by warm-ups."""

import inspect

import pytest
import torch
from support import kernel_launches, launch_cases
from support.table_drafters import cascade, tables
from support.table_runner import TableRunner
from triton.runtime.jit import JITFunction
from vllm.v1.worker.gpu.spec_decode import rejection_sampler

CASCADES = (
    *("one", "two, adaptive", "three", "lookup", "bigram", "suffix", "sources", "choice below"),
    *("unverified", "entropy, unverified", "horizontal", "horizontal lookup"),
    *("pairs", "pairs above"),
)
# One filtered request with a seed sends the whole batch through vLLM's processing.
PARAMS = [{"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.0}, {"seed": 1}, {}]
BATCHES = (PARAMS, PARAMS[1:2], [*PARAMS, {"seed": 1, "top_k": 2}])
# What all cases launch, once in a process.
COVERED: set = set()


def form(function: JITFunction, name: str, value):
    """What decides which code is compiled, but for sizes."""
    if isinstance(value, torch.Tensor):
        # Logits of all dtypes take the same code.
        narrow = value.is_floating_point() and value.dtype != torch.float64
        return "floats" if narrow else value.dtype
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, 1) if name.isupper() else "number"
    return value if name.isupper() else type(value)


class Launches:
    """Our launches: kernels with their arguments by name; they run while `run` is set."""

    def __init__(self) -> None:
        self.noted: list[tuple[JITFunction, dict]] = []
        self.run = False

    def taken(self, of) -> set[tuple]:
        """Those since the last call, each once, with what `of` says of their arguments."""
        noted, self.noted = self.noted, []
        return {
            (
                function.__name__,
                *((name, of(function, name, value)) for name, value in given.items()),
            )
            for function, given in noted
        }


@pytest.fixture
def launched(monkeypatch) -> Launches:
    launches, run = Launches(), JITFunction.run

    def record(self, *args, grid, warmup, **kwargs):
        signature = inspect.signature(self.fn)
        given = {key: value for key, value in kwargs.items() if key in signature.parameters}
        if not self.fn.__module__.startswith("vllm."):
            launches.noted.append((self, signature.bind(*args, **given).arguments))
        if launches.run:
            run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(JITFunction, "run", record)
    return launches


def covered_by(launched: Launches, cases) -> set:
    launched.noted.clear()
    launch_cases.launch(cases)
    return launched.taken(form)


def runner_of(name: str, params: list[dict]) -> TableRunner:
    options = {"keeps_rows": name != "point masses"}
    if name in CASCADES:
        options |= {"prompt_length": 4, "cascade": cascade(name)}
    return TableRunner(*tables(), params, length=4, **options)


def served(launched: Launches, name: str) -> set:
    """Of a step with drafts and without, for requests of every kind."""
    runner = runner_of(name, PARAMS)
    launched.noted.clear()
    launched.run = True
    for length in (4, 2, 0):
        runner.drafter.asked = length
        runner.step()
    launched.run = False
    return launched.taken(form)


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
    forward = kernel_launches.MetaLevel.forward
    monkeypatch.setattr(kernel_launches.MetaLevel, "forward", lambda *args: read(forward(*args)))
    with pytest.raises(RuntimeError, match="meta"):
        launch_cases.launch([kernel_launches.Cascade((3, 8))])


def test_a_launch_without_a_case_is_found(launched):
    """Negative control: no case has a level that passes drafts on."""
    cases = [case for case in launch_cases.ALL if not getattr(case, "unverified", ())]
    missing = served(launched, "unverified") - covered_by(launched, cases)
    assert {name for name, *_ in missing} == {"commit_unverified_kernel"}


def key(function: JITFunction, name: str, value):
    """What of an argument Triton's key holds for GPUs; the CPU backend compiles for fewer keys."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    free = function.do_not_specialize or ()
    if type(value) is not int or name.isupper():
        return value
    return "integer" if name in free else (value == 1, value % 16 == 0)


@pytest.mark.parametrize(
    ("name", "in_parts"),
    [
        *((name, False) for name in (*CASCADES, "stock", "point masses")),
        *((name, True) for name in ("two, adaptive", "stock")),
    ],
)
def test_a_step_launches_what_the_warm_up_has_compiled(launched, monkeypatch, name, in_parts):
    """Also where a batch is verified request by request, in parts that begin anywhere."""
    warm, served = set(), set()
    if in_parts:
        monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 4 * 5 * len(tables()[0]))
    launched.run = True
    for params in BATCHES:
        # As when an engine starts: no request has been there.
        runner = runner_of(name, [{}] * len(params))
        launched.noted.clear()
        sampler = runner.runner.rejection_sampler
        sampler.warm_up(torch.float32, runner.drafter.draft_logits)
        # And vLLM's own warm-up, in which logits are processed.
        runner = runner_of(name, [{"presence_penalty": 0.5}] * len(params))
        runner.step()
        runner.step()
        warm |= launched.taken(key)
        runner = runner_of(name, params)
        propose = runner.propose

        def after_the_target(*num_tokens, propose=propose):
            served.update(launched.taken(key))
            # What is drafted changes no launch of the target's.
            launched.run = name not in CASCADES
            propose(*num_tokens)
            launched.run = True
            launched.noted.clear()

        runner.propose = after_the_target
        for length in (4, 2):
            runner.drafter.asked = length
            runner.step()
    assert served and not served - warm
