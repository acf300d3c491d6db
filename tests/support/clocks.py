"""Clocks that disagree between the ranks of a tensor-parallel engine, and what the ranks chose."""

import json
import os
from pathlib import Path

from vllm_hsd.tools.audit.mutants import replace

DIRECTORY = "HSD_TEST_RANKS"


def install() -> None:
    """Rank 1 sees other times; every rank notes what it would pay alone and what it does."""
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    def disagreeing(observe, self, tokens: int, seconds: float, **keys) -> None:
        factor = 1 + get_tensor_model_parallel_rank() * (tokens % 5) * 3
        observe(self, tokens, seconds * factor, **keys)

    def noted(agreed, found) -> object:
        value = agreed(found)
        rank = get_tensor_model_parallel_rank()
        # What this rank would choose, had it to decide.
        own = found() if rank else value
        with Path(os.environ[DIRECTORY], str(rank)).open("a") as lines:
            lines.write(json.dumps([str(own), str(value)]) + "\n")
        return value

    replace("vllm_hsd.host.host_budget:_agreed", noted)
    replace("vllm_hsd.budget.step_times:StepTimes.observe", disagreeing)


class Worker:
    """For `worker_extension_cls`: vLLM imports this module in every rank's process."""


if DIRECTORY in os.environ:
    install()


def read(directory: Path) -> list[list[list[str]]]:
    """For each rank what it would have chosen alone and what it did, in its order."""
    return [[*map(json.loads, (directory / rank).read_text().splitlines())] for rank in "01"]
