"""vLLM's own manager of adaptive verification, on a host without a GPU, over tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from support.table_runner import TableRunner
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Streams and events, which order copies, do nothing, and nothing is compiled."""
    nothing = mock.MagicMock()
    names = dict.fromkeys(("Stream", "Event", "current_stream", "set_stream"), nothing)
    plain = adaptive_verification._assign_draft_token_budget
    with (
        mock.patch.multiple(torch.cuda, **names),
        mock.patch.object(adaptive_verification, "_assign_draft_token_budget_compiled", plain),
    ):
        yield


class AdaptiveTableRunner(TableRunner):
    """A `TableRunner` whose drafts vLLM's manager cuts; use it inside `without_a_gpu`.

    `admits` draft tokens of a step cost nothing; further ones cost more than they give.
    """

    def __init__(self, *args, admits: int, **options) -> None:
        super().__init__(*args, adapts=True, **options)
        self.manager = adaptive_verification.AdaptiveVerificationManager(
            self.states,
            torch.zeros(self.count + 1, dtype=torch.int32),
            num_bonus_tokens=1,
            max_total_logits=self.count * (self.length + 1),
        )
        tokens = self.count * (self.length + 1)
        dear = self.count + admits + 1
        self.manager.cost_tables = adaptive_verification.build_cost_tables_from_curves(
            [(self.count, 0.0)], [(dear - 1, 1.0), (dear, 1e6), (tokens, 1e6)], self.count, tokens
        )
        for slot in self.slots.tolist():
            self.manager.add_request(slot)
        # Draft tokens of each request that the last step verified.
        self.admitted = torch.zeros(self.count, dtype=torch.int64)

    def input_batch(self) -> SimpleNamespace:
        """As the base's, with as many draft tokens of each request as are admitted."""
        if self.drafted is None:
            return super().input_batch()
        requests, longest = [str(i) for i in range(self.count)], self.drafted.shape[1]
        drafts = np.full(self.count, longest, dtype=np.int32)
        self.manager.get_num_tokens(
            dict.fromkeys(requests, longest + 1), {each: [-1] * longest for each in requests}
        )
        # On the host they are spread evenly, or as they were before.
        _, host_starts = self.manager.compact_batch(
            drafts, drafts + 1, np.arange(self.count + 1, dtype=np.int32) * (longest + 1)
        )
        # vLLM 0.33 adds what the host may know.
        starts, queries, *_ = self.manager.reallocate_drafts(requests, self.slots)
        self.admitted = starts.diff().long() - 1
        tokens = torch.cat((self.states.last_sampled_tokens[self.slots], self.drafted), 1)
        return self.batch_of(tokens, starts, host_starts, queries[: self.count + 1])

    def propose(self, *num_tokens: torch.Tensor) -> None:
        """As the base's, between what vLLM's runner does for adaptive verification."""
        DraftModelSpeculator.observe_verification(self.drafter, self.slots, *num_tokens)
        super().propose(*num_tokens)
        batch = SimpleNamespace(num_reqs=self.count, idx_mapping=self.slots)
        self.manager.record_confidences(self.drafter.draft_token_confidence_probs, batch)
