"""Tokens and passes without a price in every process of an engine: all branches pay."""

from vllm_hsd.core.draft_budget import DraftBudget, Prices


class Worker:
    """For `worker_extension_cls`: vLLM imports this module in every rank's process."""


DraftBudget.prices = lambda self, *_: Prices(self.free.verify, self.free.forward)
