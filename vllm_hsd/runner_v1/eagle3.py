"""EAGLE-3 heads as levels: drafters that read the target's hidden states.

A head computes one entry per position: entry e reads token e + 1 and the target's state at position
e, and its logits are of token e + 2. Beyond the verified text the target has no states yet: there
an entry reads the head's own output at the entry before it (Li et al., "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test", section 3).

The states of a step's positions exist in that step only. Where the head does not run for a
request, because another source drafts or nothing pays, the last ones are kept, and it reads those
when it drafts again. What it has not read by then, a long prompt for example, it never reads: its
entries there are zeros, to which attention hardly gives weight, and a head lives on the last
states.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import MLAAttention

from vllm_hsd.core.drafts import ragged_arange
from vllm_hsd.eagle3 import check_head, check_states, reads_final_states, share_with_target
from vllm_hsd.runner_v1.levels import ModelLevel

logger = init_logger(f"vllm.{__name__}")

# Most states that are kept for a request, in positions.
KEPT_STATES = 32


class Eagle3Level(ModelLevel):
    """A head loaded by vLLM's loader, fed with the states of one step at a time (`take_states`).

    Args:
        runner: the GPUModelRunner (or CPUModelRunner) that hosts the target.
        vllm_config: the target's configuration.
        index: position in the cascade, 0 the cheapest.
        context_length: longest text in tokens that the head can read.
    """

    def __init__(self, runner, vllm_config: VllmConfig, index: int, context_length: int) -> None:
        super().__init__(runner, vllm_config, index, context_length)
        rows = vllm_config.scheduler_config.max_num_seqs
        # Per row of the batch: the request's slot, the first position with a state in this step,
        # its index among the step's states, and the number of positions whose tokens are verified.
        self.slot_of_row, self.first, self.index_of_first, self.verified = np.zeros(
            (4, rows), dtype=np.int64
        )
        self.places: np.ndarray | None = None
        self.states: list[torch.Tensor] = []

    def attach(self, target_model: Any, named: str) -> None:
        """Share the target's embedding and head where the checkpoint has none of its own.

        Args:
            target_model: the loaded target.
            named: what messages call the level, "levels[i].eagle3 'path'".

        Raises:
            UserError: the target gives no hidden states, or not those that the head reads, or the
                head drafts tokens that the target has not.
        """
        check_states(type(target_model), named)
        layers = None
        if not self.reads_final_states:
            layers = self.runner._get_eagle3_aux_layers_from_config()
        check_head(self.model, target_model, self.vllm_config.model_config, layers, named)
        share_with_target(self.model, target_model)
        # vLLM then has the target give out the states that the head names.
        self.runner.use_aux_hidden_state_outputs = not self.reads_final_states
        hidden = self.model.config.hidden_size
        dtype = cast(torch.dtype, self.vllm_config.model_config.dtype)
        tokens = cast(Any, self.vllm_config.speculative_config).hsd.num_speculative_tokens
        shape = (len(self.first), tokens + 1, hidden)
        # The head's own outputs, from the last verified entry on.
        self.own = torch.zeros(shape, dtype=dtype, device=self.device)
        # States of the target by request slot and position modulo KEPT_STATES.
        width = self.vllm_config.model_config.get_hidden_size()
        width = width if self.reads_final_states else self.model.model.fc.input_size
        shape = (len(self.first), KEPT_STATES, width)
        self.kept = torch.zeros(shape, dtype=dtype, device=self.device)
        self.inputs = torch.zeros(0, hidden, dtype=dtype, device=self.device)
        logger.info(
            "States for %s take %.2f GiB: max_num_seqs x (%d x width of what it reads + "
            "(num_speculative_tokens + 1) x hidden size).",
            named,
            (self.own.nbytes + self.kept.nbytes) / 2**30,
            KEPT_STATES,
        )

    @property
    def reads_final_states(self) -> bool:
        """Whether the head reads the target's last hidden states in place of inner ones."""
        return reads_final_states(self.model)

    def take_states(
        self,
        states: list[torch.Tensor],
        slots: np.ndarray,
        first: np.ndarray,
        verified: np.ndarray,
        index: np.ndarray,
        places: np.ndarray | None,
    ) -> None:
        """Take the target's hidden states of one step.

        Args:
            states: [n, width] states of one layer each, request after request.
            slots: [batch] int64, slot of each request.
            first: [batch] int64, first position of each request in the step.
            verified: [batch] int64, positions of each request whose tokens are verified.
            index: [batch] int64, where the states of those begin among the step's.
            places: [batch, P] int64, where the first P of each are from there; None: in order.
        """
        batch = len(first)
        self.states = states
        self.slot_of_row[:batch], self.first[:batch], self.verified[:batch] = slots, first, verified
        self.index_of_first[:batch], self.places = index, places
        self.clear(np.arange(batch), first, verified)

    def clear(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Make the entries at positions starts[i] to ends[i] of rows[i] zeros, until it reads them.

        Args:
            rows, starts, ends: [n] int64.
        """
        owners, offsets = ragged_arange(np.maximum(ends - starts, 0))
        layers = self.vllm_config.compilation_config.static_forward_context
        for group in self.attention_groups:
            slots = self.slots(group.kv_cache_group_id, rows[owners], starts[owners] + offsets)
            index = torch.from_numpy(slots).to(self.device)
            for name in group.layer_names:
                layer: Any = layers[name]
                if isinstance(layer, MLAAttention):
                    layer.kv_cache.view(torch.uint8).flatten(0, 1).index_fill_(0, index, 0)
                    continue
                zeros = self.own.new_zeros(len(slots), layer.num_kv_heads, layer.head_size)
                layer.impl.do_kv_cache_update(layer, zeros, zeros, layer.kv_cache, index)

    def keep(self, rows: np.ndarray, entries: np.ndarray) -> np.ndarray:
        """Keep the last states of this step from position entries[i] of rows[i] on.

        Args:
            rows: [n] int64.
            entries: [n] int64.

        Returns:
            [n] int64 first position of each that is kept, of this step or an earlier one.
        """
        kept_from = np.maximum(entries, self.verified[rows] - KEPT_STATES)
        begin = np.maximum(kept_from, self.first[rows])
        owners, offsets = ragged_arange(self.verified[rows] - begin)
        positions, owners = begin[owners] + offsets, rows[owners]
        place = np.stack([self.slot_of_row[owners], positions % KEPT_STATES])
        index = torch.from_numpy(place).to(self.device)
        self.kept[index[0], index[1]] = self._states(owners, positions)
        return kept_from

    def forward(
        self,
        tokens: np.ndarray,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        num_logits: np.ndarray,
    ) -> torch.Tensor | None:
        """See `core.levels.Level.forward`; at most one row of logits for each request.

        One pass for all tokens that follow verified ones, then one pass per token.
        """
        assert num_logits.max(initial=0) <= 1
        # Nothing precedes a text's first token, so it has no entry.
        entries, left = starts - 1, counts.copy()
        left[entries < 0] -= 1
        entries = np.maximum(entries, 0)
        logits, owners = [], []
        while (left > 0).any():
            now = np.flatnonzero(left > 0)
            verified = np.minimum(self.verified[rows[now]] - entries[now], left[now])
            count = np.maximum(verified, 1)
            wanted = np.where(count == left[now], num_logits[now], 0)
            part = super().forward(tokens[:, 1:], rows[now], entries[now], count, wanted)
            if part is not None:
                logits.append(part)
                owners.append(now[wanted > 0])
            entries[now] += count
            left[now] -= count
        if len(logits) < 2:
            return logits[0] if logits else None
        order = torch.from_numpy(np.argsort(np.concatenate(owners)))
        return torch.cat(logits)[order.to(self.device)]

    def _forward_once(self, tokens, rows, starts, counts, num_logits) -> torch.Tensor | None:
        """As `ModelLevel._forward_once`; starts and counts are of entries."""
        owners, offsets = ragged_arange(counts)
        owners, entries = rows[owners], starts[np.repeat(np.arange(len(rows)), counts)] + offsets
        verified = entries < self.verified[owners]
        self.inputs = self._states_before(owners, entries, verified)
        logits = super()._forward_once(tokens, rows, starts, counts, num_logits)
        place = entries - self.verified[owners] + 1
        kept = np.flatnonzero(place >= 0)
        index = torch.from_numpy(np.stack([owners[kept], place[kept]])).to(self.device)
        self.own[index[0], index[1]] = self.outputs[torch.from_numpy(kept).to(self.device)]
        return logits

    def _states(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """[n, width] states of the target at positions of this step, all layers in a row."""
        place = positions - self.first[rows]
        if self.places is not None:
            early = place < self.places.shape[1]
            place[early] = self.places[rows[early], place[early]]
        index = torch.from_numpy(place + self.index_of_first[rows]).to(self.device)
        return torch.cat([state.index_select(0, index) for state in self.states], dim=-1)

    def _states_before(
        self, rows: np.ndarray, entries: np.ndarray, verified: np.ndarray
    ) -> torch.Tensor:
        """[n, hidden] what entries of rows read in addition to their token."""
        hidden = self.own.new_empty(len(rows), self.own.shape[-1])
        if verified.any():
            r, e = rows[verified], entries[verified]
            old = e < self.first[r]
            states = self.kept.new_empty(len(r), self.kept.shape[-1])
            place = np.stack([self.slot_of_row[r[old]], e[old] % KEPT_STATES])
            index = torch.from_numpy(place).to(self.device)
            self._put(states, old, self.kept[index[0], index[1]])
            self._put(states, ~old, self._states(r[~old], e[~old]))
            self._put(hidden, verified, self.model.combine_hidden_states(states))
        if not verified.all():
            place = np.stack([rows, entries - self.verified[rows]])[:, ~verified]
            index = torch.from_numpy(place).to(self.device)
            self._put(hidden, ~verified, self.own[index[0], index[1]])
        return hidden

    def _put(self, hidden: torch.Tensor, where: np.ndarray, values: torch.Tensor) -> None:
        hidden[torch.from_numpy(where).to(self.device)] = values

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[n, hidden] final hidden states; keeps what the next entries read in `outputs`."""
        final, self.outputs = self.model(
            input_ids=input_ids, positions=positions, hidden_states=self.inputs
        )
        return final

    def warm_up(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """See `ModelLevel.warm_up`."""
        self.inputs = self.own.new_zeros(len(input_ids), self.own.shape[-1])
        self.run(input_ids, positions)
