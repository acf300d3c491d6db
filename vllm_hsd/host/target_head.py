"""An EAGLE-3 head of the target as a level of a cascade, which verifies nothing.

A head computes one entry per position: entry e reads token e + 1 and the target's state at position
e, and its logits are of token e + 2. Beyond the verified text the target has no states yet: there
an entry reads the head's own output at the entry before it (Li et al., "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test", section 3).

Entries of accepted tokens were computed without the target's states. So the first pass of a
proposal reads what the target's step has computed, up to num_speculative_tokens + 1 entries. Those
states exist in that step only; a request whose levels do not read a step drafts nothing later. In
later rounds what the head has missed are tokens of the draft, and it reads them one by one.

On a CPU, where levels read late, the last states of a text are kept until it drafts for it
(`unread_states`). What it never reads is zeros to it, also for requests that share blocks.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from vllm.logger import init_logger
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

from vllm_hsd.cascade.head_steps import HeadInputs, Pass, next_tokens, place_entry, read_step
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import Draft, Schedule, Verify
from vllm_hsd.cascade.vocabulary import fit_logits
from vllm_hsd.errors import quoted
from vllm_hsd.host.eagle3_head import (
    check_head,
    check_states,
    reads_final_states,
    share_with_target,
)
from vllm_hsd.host.level_caches import pass_inputs
from vllm_hsd.host.program_models import ProgramModel
from vllm_hsd.host.unread_states import UnreadStates

logger = init_logger(f"vllm.{__name__}")


class Step(NamedTuple):
    """What the target has computed in a step of T tokens.

    Attributes:
        texts: tensors of the batch and of the requests' texts, see `head_steps.next_tokens`.
        longest: most tokens of a request in it.
        states: [T, width] of each layer that the head reads.
    """

    texts: dict[str, torch.Tensor]
    longest: int
    states: list[torch.Tensor]


class ProgramHead(ProgramModel):
    """A head with its KV cache in the target's block tables.

    Args:
        speculator: the cascade that it belongs to.
        index: position in the cascade; it verifies nothing wherever it is.

    Attributes:
        reads_inner_states: whether it reads states of several layers, not the target's last ones.
        inputs: of its passes.
        kv_groups: block tables; None until there are caches.
        step: of the target, see `take_states`.
        unread: where it reads late; None where the first pass of a proposal reads the step.
        final: [B, H] final states at the last committed tokens, with `unread`.
    """

    kv_groups: KVGroups | None = None
    step: Step
    unread: UnreadStates | None = None
    final: torch.Tensor

    def __init__(self, speculator: Any, index: int) -> None:
        super().__init__(speculator, index)
        own = speculator.speculative_config
        config = own.level_configs[index]
        self.name = f"{own.hsd_level_names[index]}.eagle3 {quoted(config.model)}"
        check_states(get_model_cls(self.vllm_config.model_config), self.name)
        eagle = getattr(config.draft_model_config.hf_config, "eagle_config", None) or {}
        self.reads_inner_states = bool(eagle.get("use_aux_hidden_state", True))
        self.inner_layers = get_eagle3_aux_layers_from_config(config)
        self.inputs = HeadInputs.allocate(
            speculator.schedule,
            batch=speculator.state.batch,
            query_length=self.longest_query,
            hidden_size=config.draft_model_config.get_hidden_size(),
            dtype=speculator.dtype,
            device=speculator.device,
        )
        self.next_tokens = torch.zeros(
            speculator.max_num_tokens, dtype=torch.int32, device=speculator.device
        )
        logger.info(
            "States for %s take %.2f GiB: requests that draft x (2 x num_speculative_tokens + "
            "longest draft of a level + 4) x hidden size.",
            self.name,
            (self.inputs.states.nbytes + self.inputs.own.nbytes) / 2**30,
        )

    def read_late(self, max_num_reqs: int) -> None:
        """Keep what is to be read until drafts want it."""
        self.unread = UnreadStates(max_num_reqs)
        self.final = torch.zeros_like(self.inputs.own[:, 0])

    def warm_up(self) -> None:
        """Launch what reads late, in blocks that belong to no request."""
        unread, states = cast(UnreadStates, self.unread), torch.cat(self.step.states, -1)
        for count in (1, 2, 16):
            unread.restart(0, 0)
            unread.keep(0, states[:1].expand(count, -1))
            self.read(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
        unread.restart(0, 0)

    @property
    def longest_query(self) -> int:
        """What a step of the target computes of a draft."""
        return self.speculator.schedule.num_speculative_tokens + 1

    def attach(self, target: Any) -> None:
        """Share the target's embedding and head where the checkpoint has none of its own.

        Raises:
            UserError: a head of another target.
        """
        config = self.vllm_config.model_config
        check_head(self.model, target, config, self.inner_layers, self.name)
        share_with_target(self.model, target)

    def init_attention(self, kv_cache_config: Any) -> None:
        super().init_attention(kv_cache_config)
        self.inputs.set_kv_groups(len(kv_cache_config.kv_cache_groups))

    def take_states(
        self, batch: Any, final: torch.Tensor, inner: list[torch.Tensor] | None
    ) -> None:
        """Take what the target's step has computed, before the head runs.

        Args:
            batch: vLLM's InputBatch.
            final: [T, width] the target's last hidden states.
            inner: [T, width] after each of the layers that the head names.
        """
        states = [final] if reads_final_states(self.model) else cast(list[torch.Tensor], inner)
        count, requests = batch.num_reqs, self.speculator.req_states
        texts = {
            "index": batch.idx_mapping[:count],
            "query_start_loc": batch.query_start_loc,
            "positions": batch.positions,
            "text": requests.all_token_ids.gpu,
            "length": requests.total_len.gpu,
        }
        self.step = Step(texts, int(batch.num_scheduled_tokens.max()), states)
        drafts = self.kv_groups is not None and count <= self.speculator.state.batch
        if drafts and self.unread is None:
            inputs, entries = self.inputs, self.longest_query
            groups = cast(KVGroups, self.kv_groups)
            read_step(inputs, groups, self.speculator.max_model_len, **texts)
            source = inputs.source[: count * entries]
            states = [each.index_select(0, source) for each in states]
            inputs.states[: count * entries] = self._combined(states)

    def _combined(self, states: list[torch.Tensor]) -> torch.Tensor:
        """[n, H] what entries read of [n, width] states of each layer."""
        return self.model.combine_hidden_states(torch.cat(states, -1))

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, *more: torch.Tensor) -> Any:
        """Final states, and what the next entries read in the place of the target's states.

        Args:
            more: [n, H] what these entries read.
        """
        return self.model(input_ids=input_ids, positions=positions, hidden_states=more[0])

    def compute(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        *more: torch.Tensor,
    ) -> Any:
        """Final states of the entries of the target's step, whose own tokens `input_ids` are."""
        count, step = len(input_ids), self.step
        next_tokens(self.next_tokens, **step.texts, longest=step.longest)
        hidden = self._combined([each[:count] for each in step.states])
        tokens = self.next_tokens[:count]
        final, _ = super().compute(tokens, positions, attn_metadata, slot_mappings, hidden)
        return final

    def keep_step(self, batch: Any) -> None:
        """Keep the step's states of verified tokens, after `take_states`.

        Args:
            batch: vLLM's InputBatch.
        """
        unread, count = cast(UnreadStates, self.unread), batch.num_reqs
        slots, begins = batch.idx_mapping_np[:count], batch.num_computed_tokens_np[:count]
        length = self.step.texts["length"].numpy()[slots]
        computed = batch.num_scheduled_tokens[:count]
        verified = np.minimum(np.maximum(length - 1 - begins, 0), computed)
        states, entered = torch.cat(self.step.states, -1), self.speculator.parameters.entered
        for i, start in enumerate(batch.query_start_loc_np[:count]):
            if entered[slots[i]]:
                unread.restart(slots[i], begins[i])
            self._clear(slots[i], begins[i], begins[i] + computed[i])
            unread.keep(slots[i], states[start : start + verified[i]])

    def _clear(self, slot: int, begin: int, end: int) -> None:
        """Set the entries of the blocks that begin at these positions of a text to zero."""
        layers = self.vllm_config.compilation_config.static_forward_context
        tables, number = self.speculator.block_tables, self.speculator.kv_cache_config.num_blocks
        for group in itertools.chain(*self.groups):
            size = tables.block_sizes[group.kv_cache_group_id]
            first, last = -(-begin // size), -(-end // size)
            blocks = tables.block_tables[group.kv_cache_group_id].gpu[slot, first:last].long()
            for name in group.layer_names if first < last else ():
                cache = layers[name].kv_cache
                cache.movedim(cache.shape.index(number), 0)[blocks] = 0

    def read(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Read all that is kept of requests, before they draft.

        Args:
            slots, rows: [n] int64, and their places in the batch.
        """
        unread, speculator = cast(UnreadStates, self.unread), self.speculator
        while len(slots):
            fits = np.searchsorted(
                np.cumsum(unread.count[slots]), speculator.max_num_tokens, "right"
            )
            now, at = slots[: max(fits, 1)], torch.from_numpy(rows[: max(fits, 1)])
            begins, counts = unread.first[now], unread.count[now]
            hidden = self.model.combine_hidden_states(unread.take(now))
            inputs = pass_inputs(speculator, self.groups, now, begins, counts, ahead=1)
            final, after = super().compute(*inputs, hidden)
            last = torch.from_numpy(np.cumsum(counts) - 1)
            self.inputs.own[at, 0], self.inputs.own[at, 1] = hidden[last], after[last]
            self.final[at] = final[last]
            slots, rows = slots[len(now) :], rows[len(now) :]

    def prepare_capture(self, state: ProposalState, schedule: Schedule) -> None:
        """Programs of all lengths have the same passes."""
        for each in (self.inputs.reading, self.inputs.drafting):
            key = 0, state.batch, each.query_length
            if key not in self.captured:
                some = cast(Any, each.bucket(state.batch))
                self.captured[key] = self._metadata(some, each.query_length, for_capture=True)

    def forward(self, state: ProposalState, op: Draft | Verify, num_logits: int) -> torch.Tensor:
        """The head is fed what `head_steps` says."""
        if op.draw == 0:
            final = self._read(state.batch) if self.unread is None else self.final[: state.batch]
        else:
            missing = op.query_length
            if isinstance(op, Draft) and op.step == 0 and self.unread is None:
                # A fixed schedule has room for the target's token, which came before them.
                missing -= 1
            for back in reversed(range(missing)):
                final = self._draft(state, back)
        rows = state.rows[op.level]
        assert rows is not None
        logits = fit_logits(self.logits(final), self.speculator.vocab_size)
        return logits.to(rows.dtype).contiguous()

    def _read(self, batch: int) -> torch.Tensor:
        """Final states [B, H] of the entries of the last committed tokens of B requests."""
        inputs = self.inputs
        reading, last = inputs.reading.bucket(batch), inputs.last[:batch]
        states = inputs.states[: len(reading.input_ids)]
        final, after = self._pass(reading, states)
        inputs.own[:batch, 0] = states.index_select(0, last)
        inputs.own[:batch, 1] = after.index_select(0, last)
        return final.index_select(0, last)

    def _draft(self, state: ProposalState, back: int) -> torch.Tensor:
        """Final states [B, H] of the entries of the tokens `back` places before the last ones."""
        inputs, batch, speculator = self.inputs, state.batch, self.speculator
        groups = cast(KVGroups, self.kv_groups)
        place_entry(inputs, state, speculator.schedule, back, groups, speculator.max_model_len)
        own = inputs.own[:batch].flatten(0, 1)
        read = own.index_select(0, inputs.reads[:batch])
        final, after = self._pass(inputs.drafting.bucket(batch), read)
        own.index_copy_(0, inputs.writes[:batch], after)
        return final

    def _pass(self, fed: Pass, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What `run` gives for each token that is fed, outside the target's step."""
        metadata = self.captured.get((0, fed.batch, fed.query_length))
        if metadata is None:
            metadata = self._metadata(cast(Any, fed), fed.query_length)
        else:
            self.refresh(metadata)
        slots = build_slot_mappings_by_layer(fed.slot_mapping, self.speculator.kv_cache_config)
        return super().compute(fed.input_ids, fed.positions, metadata, slots, hidden)
