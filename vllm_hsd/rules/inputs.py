"""Batches of chain drafts: index arrays on the host over probability rows on their device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

CHAIN_METHODS = ("block", "standard", "greedy")


@dataclass(frozen=True)
class ChainBatch:
    """One draft per request, as indices into probability rows that stay where they are.

    Attributes:
        target_probs: [R, V] target probabilities (or logits, for greedy verification).
        target_rows: [batch, max_n + 1] int64, the row that scores draft token t, or the bonus row.
        draft_probs: [S, V] proposal probabilities; None when every draft token was certain.
        draft_rows: [batch, max_n] int64, the row that draft token t was drawn from, -1 for a point
            mass.
        tokens: [batch, max_n] int64 draft tokens, -1 for an empty position.
        lengths: [batch] int64, draft lengths n.
    """

    target_probs: torch.Tensor
    target_rows: np.ndarray
    draft_probs: torch.Tensor | None
    draft_rows: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray

    @classmethod
    def flat(
        cls,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        token_ids: np.ndarray,
        lengths: np.ndarray,
    ) -> ChainBatch:
        """A batch whose rows and tokens follow each other request after request.

        Args:
            target_probs: [sum(n_i + 1), V].
            draft_probs: [sum(n_i), V] or None.
            token_ids: [sum(n_i)] int64.
            lengths: [batch] int64.
        """
        width = int(lengths.max(initial=0))
        first = np.cumsum(lengths) - lengths
        positions = np.arange(width + 1)
        target_rows = (first + np.arange(len(lengths)))[:, None] + np.minimum(
            positions, lengths[:, None]
        )
        valid = positions[:-1] < lengths[:, None]
        tokens = np.full(valid.shape, -1, dtype=np.int64)
        tokens[valid] = token_ids
        draft_rows = np.full(valid.shape, -1, dtype=np.int64)
        if draft_probs is not None:
            draft_rows[valid] = np.arange(len(token_ids))
        return cls(target_probs, target_rows, draft_probs, draft_rows, tokens, lengths)

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self.lengths)

    @property
    def valid(self) -> np.ndarray:
        """[batch, max_n] bool, positions inside the drafts."""
        return np.arange(self.tokens.shape[1]) < self.lengths[:, None]

    def target(self, requests: np.ndarray, t: np.ndarray) -> torch.Tensor:
        """A copy of the target probabilities at position t[k] of requests[k]: [k, V]."""
        return self.target_probs.index_select(0, self._index(self.target_rows[requests, t]))

    def token_probs(self) -> tuple[np.ndarray, np.ndarray]:
        """Target and proposal probability of every draft token, [batch, max_n] float64.

        A point mass has proposal probability 1; both are 1 at positions without a token.
        """
        target, draft = np.ones(self.tokens.shape), np.ones(self.tokens.shape)
        scored = self.valid & (self.tokens >= 0)
        drawn = scored & (self.draft_rows >= 0)
        target[scored] = _entries(self.target_probs, self.target_rows[:, :-1], self.tokens, scored)
        if self.draft_probs is not None:
            draft[drawn] = _entries(self.draft_probs, self.draft_rows, self.tokens, drawn)
        return target, draft

    def subtract_draft(self, rows: torch.Tensor, requests: np.ndarray, t: np.ndarray) -> None:
        """max(rows - q, 0) in place: [k, V], q the proposal at position t[k] of requests[k]."""
        source = self.draft_rows[requests, t]
        certain = np.flatnonzero(source < 0)
        if len(certain) < len(source):
            assert self.draft_probs is not None
            drawn = np.flatnonzero(source >= 0)
            draft = self.draft_probs.index_select(0, self._index(source[drawn]))
            if len(certain):
                index = self._index(drawn)
                rows.index_copy_(0, index, (rows.index_select(0, index) - draft).clamp_min_(0))
            else:
                rows.sub_(draft).clamp_min_(0)
        if len(certain):
            # p <= 1 everywhere, so a point mass leaves nothing of its own token.
            tokens = self._index(self.tokens[requests, t][certain])
            rows[self._index(certain), tokens] = 0

    def _index(self, rows: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(rows).to(self.target_probs.device)


def _entries(
    probs: torch.Tensor, rows: np.ndarray, tokens: np.ndarray, where: np.ndarray
) -> np.ndarray:
    """probs[rows, tokens] of the positions in `where`, float64 on the host."""
    index = torch.from_numpy(np.stack((rows[where], tokens[where]))).to(probs.device)
    return probs[index[0], index[1]].double().cpu().numpy()


def read_chain_batch(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_token_ids: torch.Tensor,
    num_draft_tokens: Sequence[int],
    method: str,
) -> ChainBatch:
    """Check the arguments of `verify_chain` against each other; see there."""
    if method not in CHAIN_METHODS:
        raise ValueError(f"method must be one of {', '.join(CHAIN_METHODS)}, got {method!r}.")
    lengths = np.asarray(num_draft_tokens)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError("num_draft_tokens must be a list of ints, one for each request.")
    lengths = lengths.astype(np.int64)
    if (lengths < 0).any():
        i = int(np.argmax(lengths < 0))
        raise ValueError(f"num_draft_tokens[{i}] is {lengths[i]}, must not be negative.")
    drafted = int(lengths.sum())
    check_rows("target_probs", target_probs, drafted + lengths.size, "n_i + 1 for each request")
    if method == "greedy":
        draft_probs = None
    else:
        check_probs_dtype("target_probs", target_probs)
    if draft_probs is not None:
        check_rows("draft_probs", draft_probs, drafted, "n_i for each request")
        check_like("draft_probs", draft_probs, target_probs)
    token_ids = read_tokens("draft_token_ids", draft_token_ids, drafted, target_probs)
    return ChainBatch.flat(target_probs, draft_probs, token_ids, lengths)


def read_uniforms(
    lengths: np.ndarray, device: torch.device, uniforms: torch.Tensor | None
) -> np.ndarray:
    """[sum(n_i + 1)] float64 on the host, from `uniforms` or else from the default generator."""
    total = int(lengths.sum()) + lengths.size
    if uniforms is None:
        return torch.rand(total, dtype=torch.float64, device=device).cpu().numpy()
    if uniforms.shape != (total,) or uniforms.dtype != torch.float64:
        raise ValueError(
            f"uniforms must be float64 [{total}] (n_i + 1 for each request), "
            f"got {uniforms.dtype} {list(uniforms.shape)}."
        )
    flat = uniforms.cpu().numpy()
    outside = ~((flat >= 0) & (flat < 1))
    if outside.any():
        i = int(outside.argmax())
        raise ValueError(f"uniforms[{i}] is {flat[i]}, must be in [0, 1).")
    return flat


def check_rows(name: str, rows: torch.Tensor, count: int, meaning: str) -> None:
    """Raise ValueError unless ``rows`` is a floating [count, V] tensor with V > 0."""
    if not isinstance(rows, torch.Tensor) or not rows.is_floating_point():
        raise ValueError(f"{name} must be a floating-point tensor.")
    if rows.ndim != 2 or rows.shape[0] != count or rows.shape[1] == 0:
        raise ValueError(
            f"{name} must have shape [{count}, V] ({meaning}), got {list(rows.shape)}."
        )


def check_probs_dtype(name: str, rows: torch.Tensor) -> None:
    """Raise ValueError unless the rows are float32 or float64."""
    if rows.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64 probabilities, got {rows.dtype}.")


def check_like(name: str, rows: torch.Tensor, target_probs: torch.Tensor) -> None:
    """Raise ValueError unless vocabulary, dtype and device are those of target_probs."""
    mine, theirs = ((r.shape[1], r.dtype, str(r.device)) for r in (rows, target_probs))
    if mine != theirs:
        raise ValueError(
            f"{name} (vocabulary {mine[0]}, {mine[1]}, {mine[2]}) does not match target_probs "
            f"(vocabulary {theirs[0]}, {theirs[1]}, {theirs[2]})."
        )


def read_tokens(
    name: str, tokens: torch.Tensor, count: int, target_probs: torch.Tensor, *, lowest: int = -1
) -> np.ndarray:
    """The ids as int64 on the host; ValueError unless [count] integers in [lowest, V)."""
    if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be an int64 or int32 tensor.")
    if tokens.shape != (count,):
        raise ValueError(f"{name} must have shape [{count}], got {list(tokens.shape)}.")
    if tokens.device != target_probs.device:
        raise ValueError(
            f"{name} is on {tokens.device}, target_probs on {target_probs.device}: move one."
        )
    ids = tokens.cpu().numpy().astype(np.int64)
    vocabulary = target_probs.shape[1]
    outside = (ids < lowest) | (ids >= vocabulary)
    if outside.any():
        i = int(outside.argmax())
        empty = " (-1 marks an empty slot)" if lowest < 0 else ""
        raise ValueError(f"{name}[{i}] is {ids[i]}, outside the vocabulary of {vocabulary}{empty}.")
    return ids
