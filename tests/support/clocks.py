"""Clocks that disagree between the ranks of a tensor-parallel engine, and what the ranks chose."""

import json
import os
from pathlib import Path

DIRECTORY = "HSD_TEST_RANKS"


def install() -> None:
    """Rank 1 sees other times; every rank notes what it would pay alone and what it does."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    from vllm_hsd.budget.step_times import StepTimes
    from vllm_hsd.host import host_budget

    observe, agreed = StepTimes.observe, host_budget._agreed

    def note(kind: str, value: object) -> None:
        file = Path(os.environ[DIRECTORY], str(get_tensor_model_parallel_rank()))
        with file.open("a") as lines:
            lines.write(json.dumps([kind, str(value)]) + "\n")

    def disagreeing(self, tokens: int, seconds: float) -> None:
        factor = 1 + get_tensor_model_parallel_rank() * (tokens % 5) * 3
        observe(self, tokens, seconds * factor)

    def noted(found) -> object:
        value = agreed(found)
        # What this rank would choose, had it to decide.
        note("own", found() if get_tensor_model_parallel_rank() else value)
        note("agreed", value)
        return value

    host_budget._agreed = noted
    StepTimes.observe = disagreeing


class Worker:
    """For `worker_extension_cls`: vLLM imports this module in every rank's process."""


if DIRECTORY in os.environ:
    install()


def read(directory: Path, kind: str) -> list[list[str]]:
    """What each rank noted, in its order."""
    notes = ((directory / rank).read_text().splitlines() for rank in "01")
    return [[value for noted, value in map(json.loads, each) if noted == kind] for each in notes]
