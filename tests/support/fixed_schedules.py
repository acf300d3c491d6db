"""Cascades on a CPU whose proposals the host does not read, as on a GPU."""


def install() -> None:
    """Call before the engine starts; its scheduler has learned that no draft pays."""
    from vllm_hsd.budget.batch_budget import BatchBudget
    from vllm_hsd.config import platform

    platform.read_on_host = lambda: False
    BatchBudget.choose = lambda self, size: 0
