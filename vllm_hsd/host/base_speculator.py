"""What drafts in the place of vLLM's draft model on the V2 runner, on a GPU and on a CPU."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_hsd.budget.source_choice import SourcesLookup
from vllm_hsd.cascade.adaptive_verification import DraftConfidence
from vllm_hsd.cascade.cascade_steps import stage
from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.entropy_stopping import DeviceThresholds, observe_target
from vllm_hsd.cascade.level import Level
from vllm_hsd.cascade.program import ProgramSources
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.several_drafts import SeveralDrafts
from vllm_hsd.cascade.vocabulary import readable
from vllm_hsd.config.level_checks import check_states
from vllm_hsd.config.sizes import schedule_of
from vllm_hsd.errors import UserError, quoted
from vllm_hsd.host.branches import HostedBranches
from vllm_hsd.host.device_counts import DeviceCounts
from vllm_hsd.host.draft_models import loading
from vllm_hsd.host.program_models import ProgramModel
from vllm_hsd.host.request_parameters import RequestParameters


class BaseSpeculator(StandaloneARSpeculator):
    """Drafts with the levels of a `CascadeSpeculativeConfig`.

    The subclass passes the runner's isinstance checks; nothing of vLLM's drafting is used.

    Attributes:
        req_states: vLLM's table of requests, set once the runner has loaded its models.
        parameters: of the requests, set with it.
        state: of the longest drafts.
        thresholds: where a level's drafts end by entropy; None if none's do.
        several: drafts of a model next to its chains; None where it draws one of each request.
        lookup: what drafts at the lowest level from the requests' texts; None for a model alone.
        counted: levels whose rows follow from counts in texts, by their place in the cascade.
        branches: of the requests, set with `req_states`; None where the target verifies chains.
        confidence: of the drafts, for vLLM's adaptive verification; None without it.
        head: the level that reads the target's hidden states; None if none does.
        forced: int64 [max_num_reqs], tokens of a draft that a grammar has forced, 0 for others; on
            a CPU alone.
    """

    head: Any = None
    several: SeveralDrafts | None = None
    # Counted next to those of the lowest level.
    more_sources: tuple[str, ...] = ()
    num_extra_query_per_req = 0

    def __init__(self, vllm_config, device: torch.device) -> None:
        DraftModelSpeculator.__init__(self, vllm_config, device)
        # vLLM's is the drafter's, whose logits may be padded to another size.
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        # In the text, and so in a lookup's offers; the target may have no embedding for them.
        self.has_placeholders = vllm_config.model_config.is_multimodal_model
        self.hsd = vllm_config.speculative_config.hsd
        self.schedule = schedule_of(self.hsd)
        scales = [options.temperature_scale for options in self.hsd.options()]
        self.scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self.req_states: Any = None
        self.parameters: RequestParameters
        self.hosted: list[Any] = []
        self.forced = np.zeros(self.max_num_reqs, dtype=np.int64)
        self.branches: HostedBranches | None = None
        drafting = vllm_config.speculative_config.max_batch_size(vllm_config.scheduler_config)
        # Before vLLM's memory profile, and not with the weights, which sleep mode may discard.
        self.state = ProposalState.allocate(
            self.schedule,
            batch=min(self.max_num_reqs, drafting),
            max_num_reqs=self.max_num_reqs,
            vocab_size=self.vocab_size,
            # A lookup has no rows.
            dtypes=[
                None if level.last_drafts_by == "lookup" else cast(torch.dtype, self.dtype)
                for level in self.hsd.levels
            ],
            num_kv_groups=1,
            device=device,
        )
        self.confidence = self._confidence()
        # vLLM tells it what became of the drafts, and makes none of its own.
        self.use_acceptance_estimator = False
        self.acceptance_estimator = cast(Any, self.confidence)
        self.thresholds = self._thresholds()
        lowest = self.hsd.levels[0]
        names = (*getattr(lowest, "names", ()), *self.more_sources)
        named = vllm_config.speculative_config.hsd_level_names
        self.counts = DeviceCounts(self.state.counts, named, names)
        self.lookup = lowest.build(self, 0) if lowest.drafts_by == "lookup" else None
        self.counted = {
            k: level.drafters[-1].build(self, k)
            for k, level in enumerate(self.hsd.levels)
            if level.last_drafts_by == "counts"
        }
        for k, level in enumerate(self.hsd.levels):
            if level.drafters[-1].reads_target_states:
                self.head = level.drafters[-1].build(self, k)

    def _confidence(self) -> DraftConfidence | None:
        if not self.hsd.enable_adaptive_verification:
            return None
        longest = self.schedule.num_speculative_tokens
        # The last slot is of no request.
        estimator = OnlineAcceptanceEstimator(self.max_num_reqs + 1, longest, self.device)
        return DraftConfidence(estimator, self.state.lengths_of)

    def _thresholds(self) -> DeviceThresholds | None:
        stopping = [options.stopping == "entropy" for options in self.hsd.options()]
        return DeviceThresholds(stopping, self.state) if any(stopping) else None

    def _build_programs(self, levels: list[Level], groups: KVGroups) -> None:
        """Build what runs a proposal, of levels that are loaded and have their caches."""
        raise NotImplementedError

    def _levels(self, models: list[Any]) -> list[Level]:
        """The levels as programs run them, of their models: None is a lookup alone."""
        text = self.req_states.all_token_ids.gpu
        return [
            Level(
                partial(cast(Any, self.lookup), text=text) if model is None else model,
                options.verifier,
                options.max_rounds,
            )
            for model, options in zip(models, self.hsd.options(), strict=True)
        ]

    def _sources(self) -> ProgramSources | None:
        """Lookups next to the model of level 0."""
        lookup = self.lookup
        if not isinstance(lookup, SourcesLookup) or not lookup.has_drafter:
            return None
        offer = partial(lookup.offer, text=self.req_states.all_token_ids.gpu)
        of_drafter = lookup.prefers_drafter, lookup.drafter_selected
        return ProgramSources(offer, lookup.choose, lookup.drawn, *of_drafter)

    @property
    def drawn(self) -> torch.Tensor | None:
        """float32 [max_num_reqs], 0 where the target verifies a lookup's draft, 1 where a model's.

        None where all drafts are of one kind.
        """
        lookup, alone = self.lookup, self.schedule.num_levels == 1
        if alone and isinstance(lookup, SourcesLookup) and lookup.has_drafter:
            return lookup.drawn[:-1]
        return None

    @property
    def max_model_len(self) -> int:
        """Of the target; vLLM may lower it to what the cache holds, after the drafter is made."""
        levels = [each for each in cast(Any, self.speculative_config).level_configs if each]
        # vLLM gives a head the positions of its target.
        bound = [each for each in levels if each.method != "eagle3" or each.max_model_len]
        contexts = [each.draft_model_config.max_model_len for each in bound]
        return min([self.vllm_config.model_config.max_model_len, *contexts])

    @max_model_len.setter
    def max_model_len(self, value: int) -> None:
        """vLLM 0.32 sets it once."""

    def load_draft_model(self, target_model, target_attn_layer_names):
        for i, level in enumerate(self.hsd.levels):
            if level.last_drafts_by != "model":
                self.hosted.append(None)
                continue
            # Only the last source can be a model.
            reads_states = level.drafters[-1].reads_target_states
            hosted = self.head if reads_states else level.drafters[-1].build(self, i)
            if not hosted.in_target_cache:
                own = cast(Any, self.speculative_config)
                config, name = own.level_configs[i], own.hsd_level_names[i]
                with loading(f"{name}.{level.drafters[-1].kind} {quoted(config.model)}"):
                    hosted.load(config)
            if hosted.in_target_cache or reads_states:
                hosted.attach(target_model)
            self.hosted.append(hosted)
        # What vLLM takes for the draft model, never the target: it may be told to load into it, and
        # gathers encoder outputs in every step for one that takes them.
        return torch.nn.ModuleList([each.model for each in self.hosted if each and each.model])

    def set_attn(
        self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups
    ) -> None:
        check_states(kv_cache_config)
        DraftModelSpeculator.set_attn(
            self,
            model_state,
            kv_cache_config,
            block_tables,
            target_input_buffers,
            target_attn_groups,
        )
        for level in self.hosted:
            if level is not None:
                level.init_attention(kv_cache_config)
                _same_blocks(level, target_attn_groups)
                # vLLM maps the caches of all groups listed here to kernel blocks.
                self.attn_groups.extend(level.groups)
        if self.branches is not None:
            self.branches.set_attn(kv_cache_config)
        self.state.set_kv_groups(block_tables.num_kv_cache_groups)
        groups = KVGroups(
            block_tables.block_table_ptrs,
            block_tables.block_table_strides,
            block_tables.block_sizes_tensor,
        )
        if self.head is not None:
            self.head.kv_groups = groups
        models = [self.counted.get(k, level) for k, level in enumerate(self.hosted)]
        self._build_programs(self._levels(models), groups)

    @torch.inference_mode()
    def propose(
        self,
        input_batch,
        attn_metadata,
        slot_mappings,
        last_hidden_states,
        aux_hidden_states,
        num_sampled,
        num_rejected,
        *_,
        dummy_run=False,
        num_speculative_tokens=None,
        **__,
    ) -> torch.Tensor:
        computed = input_batch, attn_metadata, slot_mappings
        if self.head is not None:
            self.head.take_states(input_batch, last_hidden_states, aux_hidden_states)
        if dummy_run:
            if not self._replays_padding(input_batch.num_reqs):
                self._ingest(*computed, with_logits=True)
            return self.draft_tokens[: input_batch.num_reqs]
        if self.thresholds is not None:
            observe_target(
                self.thresholds,
                self.state,
                index=input_batch.idx_mapping.int(),
                num_sampled=num_sampled,
                num_rejected=num_rejected,
            )
        return self._propose(computed, num_sampled, num_rejected, num_speculative_tokens)

    def _replays_padding(self, count: int) -> bool:
        """Whether a dummy step ran a whole proposal, which vLLM then times."""
        return False

    def _propose(self, computed, num_sampled, num_rejected, num_speculative_tokens) -> torch.Tensor:
        """Draft after a step: its batch, attention metadata and slot mappings, and its verdict."""
        raise NotImplementedError

    def _propose_nothing(
        self, verified: int, num_sampled: torch.Tensor, count: int
    ) -> torch.Tensor:
        """End a step without drafts of `count` requests; level `verified` made their last ones."""
        self.state.counts[verified, Count.accepted] += (num_sampled - 1).clamp(min=0).sum()
        self.state.row_of_slot.fill_(-1)
        # The target may be fed them, and vLLM leaves -1 in them after steps without drafts.
        return self.draft_tokens[:count].zero_()

    def _hand_over(self, state: ProposalState, slots: np.ndarray) -> torch.Tensor:
        """[n, K] what was proposed for the requests in [n] slots, as vLLM's scheduler lists it."""
        drafts = self.draft_tokens[: len(slots)]
        if self.branches is not None:
            self.branches.state = state
            self.branches.flat_drafts(slots, self.schedule.window, drafts)
        else:
            drafts[:, : state.longest] = state.draft_tokens[: len(slots)]
        return readable(drafts, self.vocab_size) if self.has_placeholders else drafts

    def _forget(self, slots: torch.Tensor) -> None:
        """Requests enter these slots, int64 [n]: what was learned of those before is forgotten."""
        for learned in (self.thresholds, self.lookup):
            if isinstance(learned, DeviceThresholds | SourcesLookup):
                learned.forget(slots)

    def _bound_seq_lens(self, input_batch) -> None:
        """What attention may read at most; the lengths themselves are on the device."""
        bound = input_batch.seq_lens_cpu_upper_bound[: input_batch.num_reqs]
        self.seq_lens_bound = (bound + self.schedule.capacity).clamp(max=self.max_model_len)

    def _stage(self, state, schedule, index, num_sampled, verified=-1) -> None:
        """Begin a proposal; nothing after it reads what the runner hands over."""
        stage(
            state,
            schedule,
            index=index.int(),
            text=self.req_states.all_token_ids.gpu,
            length=self.req_states.total_len.gpu,
            num_sampled=num_sampled,
            **self.parameters.tensors(),
            scales=self.scales,
            max_model_len=self.max_model_len,
            verified=verified,
        )

    def _ingest(self, input_batch, attn_metadata, slot_mappings, with_logits=False) -> None:
        """Let every model compute what the target has computed in this step.

        Entries of rejected tokens are after the text and are overwritten before they are read. Next
        to prompts the other requests' tokens are computed too, which a proposal that catches up
        would do again: a batch of the prompts alone would need attention metadata of its own.
        """
        tokens = input_batch.num_tokens_after_padding
        for level in self.hosted:
            if level is None or level.in_target_cache:
                continue
            hidden = level.compute(
                input_batch.input_ids[:tokens],
                input_batch.positions[:tokens],
                attn_metadata,
                slot_mappings,
            )
            if with_logits:
                rows = self.state.batch * self.schedule.longest_logits
                level.logits(hidden[:rows])


def _same_blocks(level: ProgramModel, target_groups: list[list[Any]]) -> None:
    """Raise a UserError if a level's attention reads the cache in other blocks than it has."""
    groups = itertools.chain(*target_groups)
    sizes = {name: each.kernel_block_size for each in groups for name in each.layer_names}
    for group in itertools.chain(*level.groups):
        had = {sizes[name] for name in group.layer_names if name in sizes}
        if had - {group.kernel_block_size}:
            raise UserError(
                f"levels[{level.index}] reads the KV cache in other blocks than the target: remove "
                "its attention_backend, or give a --block-size that both backends take whole."
            )
