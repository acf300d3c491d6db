"""The target's sampler where requests have several drafts: the chain's verification, and beyond."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from vllm_hsd.core.branches import BranchStore
from vllm_hsd.core.drafts import ragged_arange, ragged_starts
from vllm_hsd.core.row_layout import Rows
from vllm_hsd.runner_v1.branches import HostedBranches
from vllm_hsd.runner_v1.noise import generators
from vllm_hsd.runner_v1.sampler import CascadeSampler, DraftingState, TargetStep
from vllm_hsd.runner_v1.sampling import rows_at
from vllm_hsd.verify.branches import VerifiedRows, follow, verify_rows
from vllm_hsd.verify.chain import argmax_rows
from vllm_hsd.verify.residual import BlockedCDF


class DrawnDrafts(NamedTuple):
    """Several drawn drafts of each of k requests.

    Attributes:
        slots: [k] int64.
        target_probs: [n, V] the target's probabilities, of these requests.
        places: of every request, [sum(lengths + 1)] int64 rows of `target_probs`, in order.
        draft_probs: of every request, [sum(lengths), V] what each draft token was drawn from.
        rows: of every request, the tokens of its drafts.
    """

    slots: np.ndarray
    target_probs: torch.Tensor
    places: list[np.ndarray]
    draft_probs: list[torch.Tensor]
    rows: list[list[list[int]]]

    def target_rows(self, places: np.ndarray) -> torch.Tensor:
        """[len(places), V] rows of the target."""
        return self.target_probs[torch.from_numpy(places).to(self.target_probs.device)]


class BranchSampler(CascadeSampler):
    """Verifies chains as `CascadeSampler`, and goes on along branches.

    In what its methods take, `whole` is the batch with its branches, `rows` how they lie in it.
    """

    def __init__(self, state: DraftingState, branches: HostedBranches) -> None:
        super().__init__(state)
        self.branches = branches

    def _rows(self, counts: np.ndarray) -> Rows | None:
        return self.branches.of_logits(counts)

    @property
    def _store(self) -> BranchStore:
        store = self.state.cascade.branches
        assert store is not None
        return store

    def _verify(self, whole: TargetStep, rows: Rows | None) -> tuple[np.ndarray, np.ndarray]:
        if rows is None:
            return super()._verify(whole, rows)
        step, batch = _chains(whole, rows), np.arange(len(whole.counts))
        # Several drawn drafts of a request are verified together.
        together = (rows.counts[:, 1:] > 0).any(1) & (not whole.sampling.greedy)
        together &= self._store.drawn[whole.slots]
        chains, accepted = self._verify_chains(step, ~together)
        emitted = np.full((len(batch), int(rows.counts.max())), -1, dtype=np.int32)
        emitted[:, : chains.shape[1]] = chains
        winner = np.zeros_like(batch)
        if together.any():
            found = self._verify_together(whole, rows, np.flatnonzero(together))
            emitted[together], accepted[together], winner[together] = found
        self._verified(step, accepted)
        emitted, winner[~together] = self._follow(whole, rows, emitted, ~together)
        self.branches.finish(winner, np.maximum((emitted >= 0).sum(1) - 1, 0), accepted)
        places = np.tile(np.arange(emitted.shape[1]), (len(batch), 1))
        won = rows.places[batch, winner, : emitted.shape[1]]
        places[:, : won.shape[1]] = won
        return emitted, places

    def _verify_together(
        self, whole: TargetStep, rows: Rows, requests: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Verify several drawn drafts of each of [k] int64 requests.

        Returns:
            (tokens [k, longest row] padded with -1; [k] int64, leading ones of the accepted ones
            that are the chain's; [k] int64, the row that holds them).
        """
        store, chains = self._store, self.state.cascade.drafts[-1]
        assert whole.slots is not None
        target, owners = whole.rows_of(requests)
        probs, _ = whole.sampling.target_probabilities(target, owners)
        counts = rows.counts[requests]
        found = np.full((len(requests), int(rows.counts.max())), -1, dtype=np.int64)
        of_chain, winner = np.zeros((2, len(requests)), dtype=np.int64)
        slots, first = whole.slots[requests], ragged_starts(whole.counts[requests] + 1)
        drawn = DrawnDrafts(slots, probs, [], [], [])
        for i, (slot, start) in enumerate(zip(slots.tolist(), first.tolist(), strict=True)):
            lengths = np.maximum(counts[i] - 1, 0)
            tokens, draft_probs = store.drawn_rows(chains, slot, lengths.tolist())
            drawn.rows.append(tokens[: int((counts[i] > 0).sum())])
            drawn.draft_probs.append(draft_probs)
            paths = zip(rows.places[requests[i]], counts[i].tolist(), strict=True)
            drawn.places.append(start + np.concatenate([places[:count] for places, count in paths]))
        by_kernels = self._has_kernels(probs.device) and self.verifier == "block"
        verify = self._verify_trees if by_kernels else self._verify_rows
        for i, verified in enumerate(verify(drawn)):
            found[i, : len(verified.token_ids)] = verified.token_ids
            of_chain[i], winner[i] = verified.of_chain, verified.winner
        return found, of_chain, winner

    @staticmethod
    def _has_kernels(device: torch.device) -> bool:
        return device.type != "cpu"

    def _verify_rows(self, drawn: DrawnDrafts) -> list[VerifiedRows]:
        """What the drafts of every request come to, one request after the other."""
        one, stream = np.ones(1, dtype=np.int64), len(self.state.cascade.levels)
        found = []
        for i, rows in enumerate(drawn.rows):
            slot, counts = drawn.slots[i : i + 1], [*map(len, rows), 1]
            numbers = [self.state.requests.uniforms(slot, one * n, stream) for n in counts]
            target_probs = drawn.target_rows(drawn.places[i])
            uniforms = torch.from_numpy(np.concatenate(numbers)).to(target_probs.device)
            found.append(
                verify_rows(target_probs, drawn.draft_probs[i], rows, self.verifier, uniforms)
            )
        return found

    def _verify_trees(self, drawn: DrawnDrafts) -> list[VerifiedRows]:
        """As `_verify_rows`, by the kernels where they have room."""
        from vllm_hsd.kernels.tree_verify import MAX_NODES
        from vllm_hsd.runner_v1.drawn_trees import verify_drawn_trees

        _, branches, length = self._store.token_ids.shape
        nodes = (branches + 1) * length
        if nodes > MAX_NODES:
            return self._verify_rows(drawn)
        stream = len(self.state.cascade.levels)
        draws = self.state.requests.take_draws(drawn.slots, nodes + 1, stream)
        target_probs = drawn.target_rows(np.concatenate(drawn.places))
        draft_probs = torch.cat(drawn.draft_probs)
        return verify_drawn_trees(target_probs, draft_probs, drawn.rows, nodes, *draws, stream)

    def _follow(
        self, whole: TargetStep, rows: Rows, emitted: np.ndarray, follows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Go on along branches from what the verification of the chains emitted.

        Args:
            whole: the batch.
            rows: of `whole`.
            emitted: [batch, width] int32 tokens, padded with -1.
            follows: [batch] bool, requests whose branches are point masses.

        Returns:
            (emitted tokens as given; [follows.sum()] int64, the row that holds them).
        """
        assert whole.slots is not None
        chosen = self._chosen(whole)
        first = ragged_starts(whole.counts + 1)

        def draw(requests: np.ndarray, branch: np.ndarray, place: np.ndarray) -> np.ndarray:
            index = first[requests] + rows.places[requests, branch, place]
            logits = rows_at(whole.processed, index)
            found = np.zeros(len(requests), dtype=np.int64)
            for some, draw_some in ((chosen, self._draw_chosen), (~chosen, self._draw)):
                own = np.flatnonzero(some[requests])
                if len(own):
                    found[own] = draw_some(whole, logits[own], requests[own], place[own])
            return found

        token_ids, counts, winner = follow(
            emitted,
            (emitted >= 0).sum(1),
            self._store.token_ids[whole.slots],
            np.where(follows[:, None], np.maximum(rows.counts[:, 1:] - 1, 0), 0),
            draw,
        )
        emitted = np.ascontiguousarray(token_ids[:, : max(int(counts.max()), 1)], dtype=np.int32)
        return emitted, winner[follows]

    def _draw_chosen(
        self, step: TargetStep, logits: torch.Tensor, requests: np.ndarray, place: np.ndarray
    ) -> np.ndarray:
        """[k] int64 tokens at [k] places after the text, of requests as `_chosen`."""
        noise = generators(step.noise[requests], place.tolist())
        sampler = self.sampler.topk_topp_sampler
        return step.sampling.coupled_tokens(logits, requests, noise, sampler)

    def _draw(
        self, step: TargetStep, logits: torch.Tensor, requests: np.ndarray, place: np.ndarray
    ) -> np.ndarray:
        """[k] int64 tokens of other requests; -1 where their distribution is not normalized."""
        if step.sampling.greedy:
            return argmax_rows(logits)[0]
        assert step.slots is not None
        probs, is_normalized = step.sampling.target_probabilities(logits, requests)
        slots, one = step.slots[requests], np.ones(len(requests), dtype=np.int64)
        uniforms = self.state.requests.uniforms(slots, one, stream=len(self.state.cascade.levels))
        tokens = BlockedCDF(probs).draw(torch.from_numpy(uniforms).to(probs.device)).cpu().numpy()
        return np.where(is_normalized, tokens, -1)


def _chains(whole: TargetStep, rows: Rows) -> TargetStep:
    """The step without what was computed for branches."""
    counts = rows.counts[:, 0]
    owners, offsets = ragged_arange(counts)
    processed = whole.processed[: len(owners)]  # of one request: nothing is copied
    if len(counts) > 1:
        index = ragged_starts(whole.counts + 1)[owners] + offsets
        processed = whole.processed.index_select(0, torch.from_numpy(index).to(processed.device))
    scheduled = np.where(
        np.arange(whole.scheduled.shape[1]) < counts[:, None] - 1, whole.scheduled, -1
    )
    return whole._replace(
        counts=counts - 1,
        scheduled=scheduled[:, : int(counts.max()) - 1],
        processed=processed,
        owners=owners,
    )
