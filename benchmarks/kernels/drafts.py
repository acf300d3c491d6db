"""Batches of drafts for the kernel benchmarks, in the layouts of the compared samplers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from vllm_hsd.kernels.chain_verify import ChainResult, verify_chain_padded
from vllm_hsd.kernels.sample_row import sample_row


@dataclass
class Drafts:
    """``batch`` drafts of ``n`` tokens, drawn from their rows by ``sample_row``.

    Target logits are independent normal numbers times 4 in bfloat16, the draft's are the target's
    plus ``noise`` times normal numbers.
    """

    target: torch.Tensor  # [batch * (n + 1), V]
    draft: torch.Tensor  # [batch * n, V]
    tokens: torch.Tensor  # int64 [batch * n]
    lse: torch.Tensor  # float32 [batch * n]
    temperature: torch.Tensor  # float32 [batch]
    seeds: torch.Tensor  # int64 [batch]
    n: int

    @classmethod
    def make(
        cls,
        vocabulary: int,
        batch: int,
        n: int,
        temperature: float,
        *,
        noise: float,
        device: str = "cpu",
    ) -> "Drafts":
        target = torch.empty(batch, n + 1, vocabulary, device=device, dtype=torch.bfloat16)
        draft = torch.empty_like(target[:, 1:])
        for i in range(batch):
            target[i] = 4 * torch.randn(n + 1, vocabulary, device=device)
            draft[i] = target[i, :n].float() + noise * torch.randn(n, vocabulary, device=device)
        seeds = torch.randint(2**62, (batch,), device=device)
        draws = torch.arange(n, device=device).repeat(batch)
        draft = draft.flatten(0, 1)
        row_temperature = torch.full((batch * n,), temperature, device=device)
        tokens, lse = sample_row(draft, row_temperature, seeds.repeat_interleave(n), draws)
        return cls(
            target.flatten(0, 1), draft, tokens, lse, row_temperature[:batch].clone(), seeds, n
        )

    @property
    def batch(self) -> int:
        return self.seeds.shape[0]

    def ours(self, method: str, lse: bool) -> ChainResult:
        arguments = self.vllm_arguments
        return verify_chain_padded(
            self.target,
            *(arguments[k] for k in ("draft_logits", "draft_sampled", "cu_num_logits")),
            arguments["idx_mapping"],
            self.temperature,
            self.seeds,
            torch.zeros_like(self.seeds),
            max_draft_tokens=self.n,
            method=method,
            draft_lse=self.lse.view(self.batch, self.n) if lse else None,
        )

    @cached_property
    def vllm_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's V2 ``rejection_sample`` except for the target's logits."""
        device = self.target.device
        rows = self.n + 1
        sampled = torch.zeros(self.batch, rows, dtype=torch.int64, device=device)
        sampled[:, 1:] = self.tokens.view(self.batch, self.n)
        index = torch.arange(self.batch, dtype=torch.int32, device=device)
        return {
            "draft_logits": self.draft.view(self.batch, self.n, -1),
            "draft_sampled": sampled.flatten(),
            "cu_num_logits": torch.arange(self.batch + 1, dtype=torch.int32, device=device) * rows,
            "pos": torch.arange(rows, device=device).repeat(self.batch),
            "idx_mapping": index,
            "expanded_idx_mapping": index.repeat_interleave(rows),
            "expanded_local_pos": torch.arange(rows, dtype=torch.int32, device=device).repeat(
                self.batch
            ),
            "temperature": self.temperature,
            "seed": self.seeds,
            "num_speculative_steps": self.n,
        }

    def needed_bytes(self, num_accepted: torch.Tensor, lse: bool) -> float:
        """Bytes of the rows that any verifier has to read once for its decision.

        Every target row of a draft for its logsumexp (and every proposal row, unless theirs is
        given), the row after a draft that is accepted whole, and both rows of a residual.
        """
        row = self.target.shape[1] * self.target.element_size()
        if self.temperature[0] == 0:
            return float(row * (self.n + 1) * self.batch)
        whole = int((num_accepted == self.n).sum())
        rows = self.batch * self.n * (1 if lse else 2) + whole + 2 * (self.batch - whole)
        return float(row * rows)
