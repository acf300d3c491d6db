"""What an engine's drafts were drawn from, recorded while it serves.

The distribution that a draft token was drawn from is a function of the text before it, so tokens
may be ordered by it (see docs/lossless.md). The drawn token itself is not: only a lookup's, or one
of a greedy drafter, which is the same as such a distribution with one token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm_hsd.tools.audit.directions import ROW_WIDTH, rows_of

# Of a request: place in its answer -> a row of `directions.rows_of`, of ids and probabilities;
# place of the first token of a step -> draft tokens there, which are fixed before the verdict.
Offered = tuple[dict[int, np.ndarray], dict[int, int]]


class OfferRecorder:
    """Follows the verifier of one V2 runner, ours or vLLM's.

    Attributes:
        certain: whether draft tokens without probabilities are those of a lookup or of a greedy
            drafter; otherwise they are left out. None: draft lengths are recorded, and no rows.
        found: request id -> what it was offered.
    """

    def __init__(self, runner: Any, certain: bool | None) -> None:
        self.requests, self.sampler = runner.req_states, runner.rejection_sampler
        self.certain = certain
        self.found: dict[str, Offered] = {}
        self.verify = self.sampler._verify
        self.sampler._verify = self._verify

    def _verify(self, logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, *rest):
        self._record(draft_logits, rest[-1], cu_num_logits.tolist(), idx_mapping)
        return self.verify(
            logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping, *rest
        )

    def _record(
        self,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        starts: list[int],
        idx_mapping: torch.Tensor,
    ) -> None:
        """Keep what every request of a verification is offered.

        Args:
            draft_logits: [D, K, V] of vLLM's drafter, before temperature.
            draft_sampled: [num_logits], the input token of each row of logits; -1 for none.
            starts: of each request's rows, and the end of all.
            idx_mapping: [B], slots.
        """
        sampler, rows, given = self.sampler, draft_logits, dict[str, Any]()
        temperature = sampler.sampler.sampling_states.temperature.gpu
        if hasattr(sampler, "drafts"):  # ours
            rows = sampler.draft_rows(draft_logits, sampler.longest)
            given = sampler.drafts(draft_logits, idx_mapping)
            temperature = given["draft_temperature"]
        slots, tokens = idx_mapping.tolist(), draft_sampled.tolist()
        entries = given.get("draft_index", idx_mapping).tolist()
        limits = given["draft_length"].tolist() if "draft_length" in given else None
        drawn_at = temperature[idx_mapping.long()].tolist()
        ends = self.requests.total_len.gpu[idx_mapping.long()].tolist()
        drawn: list[tuple[dict[int, np.ndarray], int, int, int, float]] = []
        for i, (slot, entry) in enumerate(zip(slots, entries, strict=True)):
            draft = tokens[starts[i] + 1 : starts[i + 1]]
            if limits is not None:
                draft = draft[: limits[entry] if entry >= 0 else 0]
            length = next((t for t, token in enumerate(draft) if token < 0), len(draft))
            name = self.requests.index_to_req_id[slot]
            offers, lengths = self.found.setdefault(name, ({}, {}))
            place = ends[i] - int(self.requests.prompt_len.np[slot])
            lengths[place] = length
            for later in [each for each in offers if each >= place]:
                del offers[later]  # the rest of a rejected draft
            for t, token in enumerate(draft[:length]):
                if rows is not None and drawn_at[i] > 0:
                    drawn.append((offers, place + t, entry, t, drawn_at[i]))
                elif self.certain and drawn_at[i] >= 0:
                    row = np.full((2, ROW_WIDTH), -1, dtype=np.float32)
                    row[:, 0] = token, 1
                    offers[place + t] = row
        if drawn and self.certain is not None:
            assert rows is not None
            owners, places, entry_of, steps, divisors = map(list, zip(*drawn, strict=True))
            chosen = rows[entry_of, steps].float()
            own = rows_of(chosen / torch.tensor(divisors, device=chosen.device)[:, None])
            for offers, place, row in zip(owners, places, own, strict=True):
                offers[place] = row


def install(llm: Any, certain: bool | None) -> bool:
    """Record from now on; whether the runner is one whose drafts can be followed."""
    return bool(llm.collective_rpc(_install, args=(certain,))[0])


def take(llm: Any) -> dict[str, Offered]:
    """What was offered by request id since `install` or the last call."""
    found: dict[str, Offered] = llm.collective_rpc(_take)[0]
    return found


def _install(worker: Any, certain: bool | None) -> bool:
    runner = worker.model_runner
    if hasattr(runner, "vllm_hsd_recorder"):
        runner.vllm_hsd_recorder.certain, runner.vllm_hsd_recorder.found = certain, {}
        return True
    if not hasattr(runner, "req_states") or runner.rejection_sampler is None:
        return False  # the V1 runner, or no speculation
    if getattr(runner.speculator, "branches", None) is not None:
        return False  # how a step of several drafts ends does not tell where each one did
    runner.vllm_hsd_recorder = OfferRecorder(runner, certain)
    return True


def _take(worker: Any) -> dict[str, Offered]:
    recorder = worker.model_runner.vllm_hsd_recorder
    found, recorder.found = recorder.found, {}
    return found
