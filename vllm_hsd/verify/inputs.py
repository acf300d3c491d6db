"""The flat layout of a batch of chain drafts: checked once, then read by position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_hsd.verify.residual import is_normalized

CHAIN_METHODS = ("block", "standard", "greedy")


@dataclass(frozen=True)
class ChainBatch:
    """Rows on their device, everything with one number per draft token on the host.

    Request i owns target rows first_target[i] .. + lengths[i] and draft rows first_draft[i] ..
    + lengths[i] - 1.
    """

    target_probs: torch.Tensor  # [sum(n_i + 1), V]
    draft_probs: torch.Tensor | None  # [sum(n_i), V]
    lengths: np.ndarray  # int64 [batch]
    tokens: np.ndarray  # int64 [batch, max_n], -1 where there is none
    valid: np.ndarray  # bool [batch, max_n], True at the n_i slots of a request
    first_target: np.ndarray  # int64 [batch]
    first_draft: np.ndarray  # int64 [batch]

    @classmethod
    def read(
        cls,
        target_probs: torch.Tensor,
        draft_probs: torch.Tensor | None,
        draft_token_ids: torch.Tensor,
        num_draft_tokens: Sequence[int],
        method: str,
    ) -> "ChainBatch":
        """Check the arguments of verify_chain against each other; see there."""
        if method not in CHAIN_METHODS:
            raise ValueError(f"method must be one of {', '.join(CHAIN_METHODS)}, got {method!r}.")
        lengths = np.asarray(num_draft_tokens)
        if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
            raise ValueError("num_draft_tokens must be a list of ints, one for each request.")
        lengths = lengths.astype(np.int64)
        if (lengths < 0).any():
            i = int(np.argmax(lengths < 0))
            raise ValueError(f"num_draft_tokens[{i}] is {lengths[i]}, must not be negative.")
        size, drafted = lengths.size, int(lengths.sum())
        check_rows("target_probs", target_probs, drafted + size, "n_i + 1 for each request")
        if method == "greedy":
            draft_probs = None
        else:
            check_probs_dtype("target_probs", target_probs)
        if draft_probs is not None:
            check_rows("draft_probs", draft_probs, drafted, "n_i for each request")
            check_like("draft_probs", draft_probs, target_probs)
        ids = read_tokens("draft_token_ids", draft_token_ids, drafted, target_probs)

        width = int(lengths.max(initial=0))
        valid = np.arange(width) < lengths[:, None]
        tokens = np.full((size, width), -1, dtype=np.int64)
        tokens[valid] = ids
        first_draft = lengths.cumsum() - lengths
        return cls(
            target_probs,
            draft_probs,
            lengths,
            tokens,
            valid,
            first_draft + np.arange(size),
            first_draft,
        )

    @property
    def size(self) -> int:
        """Number of requests."""
        return self.lengths.size

    def rows_of(self, first: np.ndarray, requests: np.ndarray, t: np.ndarray) -> torch.Tensor:
        """Flat row numbers of position t[k] of request requests[k], on the rows' device."""
        return torch.from_numpy(first[requests] + t).to(self.target_probs.device)

    def target_rows(self, requests: np.ndarray, t: np.ndarray) -> torch.Tensor:
        """A fresh copy of p_t of the requests: [k, V]."""
        return self.target_probs.index_select(0, self.rows_of(self.first_target, requests, t))

    def proposal(
        self, requests: np.ndarray, t: np.ndarray
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """q_t of the requests as (rows [k, V], None), or (None, token ids [k]) when one-hot."""
        if self.draft_probs is None:
            ids = torch.from_numpy(self.tokens[requests, t])
            return None, ids.to(self.target_probs.device)
        rows = self.rows_of(self.first_draft, requests, t)
        return self.draft_probs.index_select(0, rows), None

    def token_probs(self) -> tuple[np.ndarray, np.ndarray]:
        """p(x) and q(x) of every draft token: two float64 [sum(n_i)] arrays."""
        device = self.target_probs.device
        request, t = np.nonzero(self.valid)
        ids = torch.from_numpy(np.maximum(self.tokens[request, t], 0)).to(device)
        rows = self.rows_of(self.first_target, request, t)
        target = self.target_probs[rows, ids].double().cpu().numpy()
        if self.draft_probs is None:
            return target, np.ones_like(target)
        draft = self.draft_probs[torch.arange(ids.numel(), device=device), ids]
        return target, draft.double().cpu().numpy()

    def coins(
        self,
        generators: Mapping[int, torch.Generator] | None,
        uniforms: torch.Tensor | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """(float64 [batch, max_n] for the draft tokens, 1 where there is none; [batch] for the
        final ones), from ``uniforms`` or else from the generators."""
        total = self.target_probs.shape[0]
        if uniforms is None:
            uniforms = torch.rand(total, dtype=torch.float64, device=self.target_probs.device)
            for i, generator in (generators or {}).items():
                if i < self.size:
                    first = self.first_target[i]
                    uniforms[first : first + self.lengths[i] + 1].uniform_(generator=generator)
        elif uniforms.shape != (total,) or uniforms.dtype != torch.float64:
            raise ValueError(
                f"uniforms must be float64 [{total}] (n_i + 1 for each request), "
                f"got {uniforms.dtype} {list(uniforms.shape)}."
            )
        flat = uniforms.cpu().numpy()
        outside = ~((flat >= 0) & (flat < 1))
        if outside.any():
            i = int(outside.argmax())
            raise ValueError(f"uniforms[{i}] is {flat[i]}, must be in [0, 1).")
        last = self.first_target + self.lengths
        accept = np.ones(self.tokens.shape)
        accept[self.valid] = np.delete(flat, last)
        return accept, flat[last]

    def usable(
        self, target_ok: np.ndarray, draft_ok: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(draft length up to the first unusable row or empty slot, whether the row after it is
        usable): int64 [batch], bool [batch].

        Args:
            target_ok: bool [sum(n_i + 1)].
            draft_ok: bool [sum(n_i)] or None when every proposal row is usable.
        """
        bad_first = ~target_ok[self.first_target]
        if bad_first.any():
            i = int(bad_first.argmax())
            raise ValueError(
                f"target_probs row {self.first_target[i]}, the first one of request {i}, is not "
                "usable (finite, not negative, sum 1 within 1e-3): check that request's logits."
            )
        drawn = self.tokens >= 0
        if draft_ok is not None:
            drawn[self.valid] &= draft_ok
        if not target_ok.all():
            # Token t stays in the draft although the row after it is unusable; t + 1 does not.
            after = np.ones(self.valid.shape, dtype=bool)
            after[self.valid] = np.delete(target_ok, self.first_target + self.lengths)
            drawn &= after
        length = np.logical_and.accumulate(drawn, axis=1).sum(1)
        return length, target_ok[self.first_target + length]

    def result_rows(
        self, accepted: np.ndarray, final: np.ndarray, has_final: np.ndarray
    ) -> np.ndarray:
        """int64 [batch, max_n + 1]: accepted tokens, the final one where there is one, then -1."""
        out = np.full((self.size, self.tokens.shape[1] + 1), -1, dtype=np.int64)
        keep = np.arange(self.tokens.shape[1]) < accepted[:, None]
        out[:, :-1][keep] = self.tokens[keep]
        rows = np.flatnonzero(has_final)
        out[rows, accepted[rows]] = final[rows]
        return out


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


def check_probs(name: str, rows: torch.Tensor) -> None:
    """Raise ValueError for the first row that is not a probability law."""
    bad = ~is_normalized(rows)
    if bad.any():
        raise ValueError(
            f"{name} row {int(bad.argmax())} is not a law (finite, not negative, sum 1 within "
            "1e-3)."
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
