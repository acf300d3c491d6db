"""The cascade as a proposer of vLLM's V1 runner."""

from __future__ import annotations

import functools

import numpy as np
import torch
from vllm.config.utils import replace as replace_config
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.counters import LevelCounts
from vllm_hsd.core.drafts import DraftStore, ragged_starts
from vllm_hsd.core.levels import DraftBatch, Sources
from vllm_hsd.draft_models import loading
from vllm_hsd.level_checks import check_states
from vllm_hsd.runner_v1.adaptive import agree_on_prices
from vllm_hsd.runner_v1.branch_sampler import BranchSampler
from vllm_hsd.runner_v1.branches import HostedBranches
from vllm_hsd.runner_v1.build import build, build_levels, with_sources
from vllm_hsd.runner_v1.eagle3 import Eagle3Level
from vllm_hsd.runner_v1.hooks import install_on_runner
from vllm_hsd.runner_v1.levels import ModelLevel
from vllm_hsd.runner_v1.noise import generators
from vllm_hsd.runner_v1.sampler import CascadeSampler
from vllm_hsd.runner_v1.sampling import GREEDY_BELOW, RequestSampling


class CascadeProposer(DraftModelProposer):
    """Drafts with a cascade wherever the runner expects a draft model.

    It subclasses `DraftModelProposer` so that the runner's isinstance checks pass, and never runs
    its __init__, which allocates the buffers of a single drafter.
    """

    def __init__(self, vllm_config, device: torch.device, runner) -> None:
        self.vllm_config, self.device, self.runner = vllm_config, device, runner
        self.speculative_config = vllm_config.speculative_config
        self.cascade_config: CascadeConfig = vllm_config.speculative_config.hsd
        hsd = self.cascade_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self.kv_cache_gid = 0
        self.draft_attn_groups = []
        self.hosted = build_levels(vllm_config, runner)
        self.model_levels: list[ModelLevel] = [
            hosted.model for hosted in self.hosted if isinstance(hosted.model, ModelLevel)
        ]
        self.branches: HostedBranches | None = None
        if hsd.branches > 1:
            self.branches = HostedBranches(self, hsd.branches, hsd.num_speculative_tokens)
        self.select_levels(list(range(len(self.hosted))), hsd.draft_lengths)
        install_on_runner(runner, self)

    def select_levels(
        self, levels: list[int], draft_lengths: list[int], sources: list[int] | None = None
    ) -> None:
        """Serve the next requests with some of the hosted levels: one engine compares cascades.

        Only between requests: what is known of those in progress is forgotten.

        Args:
            levels: numbers of the levels, cheapest first.
            draft_lengths: one per level; the last is the draft that the target verifies.
            sources: numbers of those of the lowest level that draft, ascending; None: all.

        Raises:
            ValueError: unknown levels or sources, or draft lengths that the engine was not started
                for.
        """
        hosted = self.hosted
        if sources is not None:
            hosted = with_sources(hosted, levels[0], sources, self.cascade_config.adaptive)
        drafting = build(hosted, levels, draft_lengths, self.vllm_config, self.runner)
        self.sources = sources
        self.cascade, self.requests, self.table, self.heads, self.lazy, self.clock = drafting
        self.selected, self.num_speculative_tokens = levels, draft_lengths[-1]

    def take_counts(self) -> LevelCounts:
        """Counts of every hosted level, and of the lowest one's sources, since the last call."""
        taken = self.cascade.counters.take()
        lowest = self.hosted[0].level
        names = lowest.names if isinstance(lowest, Sources) else []
        counts = LevelCounts.zeros(len(self.hosted), names)
        counts.rows[self.selected] = taken.rows[: len(self.selected)]
        if taken.sources:
            own = range(len(names)) if self.sources is None else self.sources
            counts.rows[len(self.hosted) + np.array(own)] = taken.rows[len(self.selected) :]
        return counts

    def load_model(self, target_model) -> None:
        """Load the levels that are models; give exits and heads what they share of the target."""
        for hosted in self.hosted:
            if isinstance(hosted.model, ModelLevel):
                with loading(hosted.named):
                    if hosted.loads is not None:
                        hosted.model.load(
                            self._draft_vllm_config(hosted.loads),
                            hosted.loads.draft_model_config,
                            hosted.loads.draft_load_config,
                        )
                    hosted.model.attach(target_model, hosted.named)
        self.runner.rejection_sampler = (
            CascadeSampler(self) if self.branches is None else BranchSampler(self, self.branches)
        )

    def _draft_vllm_config(self, level_config):
        """vLLM's own way from a target's configuration to a drafter's, for one level."""
        own, self.speculative_config = self.speculative_config, level_config
        try:
            if level_config.method == "eagle3":
                # A head's modules read the target's configuration in addition to their own.
                config = SpecDecodeBaseProposer._create_draft_vllm_config(self)
                return replace_config(config, speculative_config=level_config)
            return self._create_draft_vllm_config()
        finally:
            self.speculative_config = own

    def initialize_attn_backend(self, kv_cache_config, kernel_block_sizes=None) -> None:
        check_states(kv_cache_config)
        for level in self.model_levels:
            level.init_attention(kv_cache_config, kernel_block_sizes)
        self.draft_attn_groups = [g for level in self.model_levels for g in level.attention_groups]
        if self.branches is not None:
            self.branches.install(kv_cache_config)

    def initialize_cudagraph_keys(self, cudagraph_mode) -> None:
        """Levels run without CUDA graphs on this runner."""

    def validate_same_kv_cache_group(self, kv_cache_config) -> None:
        """Levels may be in several KV-cache groups: nothing to check."""

    @torch.inference_mode()
    def dummy_run(
        self, num_tokens, use_cudagraphs=True, is_graph_capturing=False, slot_mappings=None
    ) -> None:
        """Run every level once on `num_tokens` zeros, for memory profiling and compilation."""
        input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
        positions = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        for level in self.model_levels:
            with set_forward_context(
                None, self.vllm_config, num_tokens=num_tokens, slot_mapping={}
            ):
                level.warm_up(input_ids, positions)

    def request_slots(self, count: int) -> np.ndarray:
        """[count] slots in `requests` of the first `count` requests of the batch."""
        return self.table.slots(self.runner.input_batch.req_ids[:count])

    @torch.inference_mode()
    def propose_draft_token_ids(
        self,
        scheduler_output,
        sampled_token_ids,
        sampling_metadata,
        hidden_states,
        sample_hidden_states,
        aux_hidden_states,
        *unused,
    ) -> list[list[int]]:
        """Draft for the requests that have just sampled, fill the caches for all others.

        Takes the place of the runner's method of the same name; runs after bookkeeping, so
        `sampled_token_ids` are lists and the batch already holds them.
        """
        input_batch, requests = self.runner.input_batch, self.requests
        slots = self.request_slots(input_batch.num_reqs)
        sampled = np.array([len(ids) > 0 for ids in sampled_token_ids])
        scheduled = self._scheduled(scheduler_output, len(slots))
        length, requested = self._lengths(scheduled, slots, sampled)
        if self.cascade.budget is not None:
            times = self.cascade.budget.times[-1]
            self.clock.step_ended(scheduler_output, bool(sampled.all()), times)
        if self.lazy is not None:
            self.lazy.step_began(length)
        # Whatever a level computed after the last accepted token is forgotten; a level without a
        # cache of its own is always up to date.
        computed = length - sampled
        first = input_batch.num_computed_tokens_cpu[: len(slots)].astype(np.int64)
        valid, places = computed, None
        if self.branches is not None and (followed := self.branches.followed) is not None:
            # Where a branch won, levels computed other tokens, and the states are in its row.
            won = followed.kept > followed.of_chain
            valid = np.where(won, first + 1 + followed.of_chain, computed)
            places = followed.places
        requests.cached[:, slots] = np.minimum(requests.cached[:, slots], valid)
        for k, level in enumerate(self.cascade.levels):
            if level is not None and not level.keeps_cache:
                requests.cached[k, slots] = computed
        for level in self.model_levels:
            if isinstance(level, Eagle3Level):
                layers = [hidden_states] if level.reads_final_states else aux_hidden_states
                index = ragged_starts(scheduled)
                level.take_states(layers, slots, first, computed, index, places)
        # A head reads the target's state of a position and the token after it.
        known = np.tile(computed, (len(self.cascade.levels), 1))
        for states in self.heads:
            known[states.k] += 1
        requests.rows[slots] = np.arange(len(slots))
        requests.end[slots] = requests.committed[slots] = length
        scales = [options.temperature_scale for options in self.cascade.options]
        sampling = RequestSampling(sampling_metadata, scales)
        batch = DraftBatch(
            tokens=input_batch.token_ids_cpu,
            rows=requests.rows,
            end=requests.end,
            cached=requests.cached,
            eos=requests.eos,
            greedy=sampling.greedy and not sampling.masks,
            probs=lambda logits, slots, level: sampling.draft_probabilities(
                logits, requests.rows[slots], level
            ),
            uniforms=requests.uniforms,
            thresholds=requests.thresholds,
            coupled=self._coupled(slots),
            choose=functools.partial(self._choose, sampling),
        )
        for states in self.heads:
            states.before_drafting(slots)
        if self.branches is not None:
            self.branches.make_room(slots, length - 1, requested)
        drafts = self._draft(batch, slots, requested, known)
        if self.lazy is not None:
            self.lazy.step_ended(slots)
        for states in self.heads:
            states.after_drafting(slots, known[states.k])
        if self.branches is not None:
            flat = self.branches.flat_drafts(slots)
            self.clock.drafting_ended()
            return flat
        counts = drafts.counts[slots].tolist()
        token_ids = drafts.token_ids[slots].tolist()
        self.clock.drafting_ended()
        return [ids[:count] for ids, count in zip(token_ids, counts, strict=True)]

    def _draft(
        self, batch: DraftBatch, slots: np.ndarray, requested: np.ndarray, known: np.ndarray
    ) -> DraftStore:
        """Draft for the requests that may, at this step's prices.

        With `adaptive` a level that drafts nothing computes nothing, prompts included: it catches
        up in one forward pass when it drafts again.
        """
        cascade, adaptive = self.cascade, self.cascade_config.adaptive
        if cascade.branches is not None:
            cascade.branches.clear(slots)
        if not adaptive:
            idle = requested == 0
            cascade.models.ingest(batch, slots[idle], known[:, idle])
        if cascade.budget is None:
            return cascade.propose(batch, slots, requested)
        if adaptive and any(level is not None for level in cascade.levels):
            # A first token does not wait for a model to read the prompt.
            prompts = self.runner.input_batch.num_prompt_tokens[: len(slots)]
            requested = np.where(batch.end[slots] - prompts == 1, 0, requested)
        cascade.drafts[-1].clear(slots)
        drafting = requested > 0
        if drafting.any():
            running, slots, requested = len(slots), slots[drafting], requested[drafting]
            selects = adaptive and cascade.budget.selects
            offer = cascade.lowest.offer(batch, slots, requested) if selects else None
            agree_on_prices(cascade.budget, slots, requested, adaptive, running, offer)
            cascade.propose(batch, slots, requested, cascade.budget.step.selection)
        return cascade.drafts[-1]

    def _coupled(self, slots: np.ndarray) -> np.ndarray | None:
        """[slots] bool for `DraftBatch.coupled`: greedy requests need no probabilities either."""
        coupled = self.requests.noise[slots].astype(bool)
        greedy = self.runner.input_batch.temperature_cpu[: len(slots)] < GREEDY_BELOW
        # Several drafts of a request are drawn only where they differ.
        if not coupled.any() and not (self.cascade_config.several_drafts and greedy.any()):
            return None
        found = np.zeros(len(self.requests.end), dtype=bool)
        found[slots] = coupled | greedy
        return found

    def _choose(
        self,
        sampling: RequestSampling,
        logits: torch.Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        level: int,
    ) -> np.ndarray:
        """See `DraftBatch.choose`: as the target's sampler would draw from the level's logits."""
        requests = self.requests
        rows = requests.rows[slots]
        return sampling.coupled_tokens(
            sampling.masked(logits, rows),
            rows,
            generators(requests.noise[slots], (positions - requests.committed[slots]).tolist()),
            self.runner.sampler.topk_topp_sampler,
            sampling.scales[level],
        )

    def follow_scheduler(self, scheduler_output) -> None:
        """Take note of requests that left, joined or came back since the last step."""
        table = self.table
        for request_id in scheduler_output.finished_req_ids:
            table.remove(request_id)
        table.make_room(self.runner.input_batch.req_id_to_index)
        entered = {}
        for request in scheduler_output.scheduled_new_reqs:
            table.remove(request.req_id)
            entered[request.req_id] = request.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                entered[request_id] = computed
        for request_id, computed in entered.items():
            valid = computed if self.lazy is None else self.lazy.usable(request_id, computed)
            table.enter(request_id, valid)
        if self.vllm_config.kv_transfer_config is not None and self.heads and entered:
            # Another process may have computed their prefixes, and no head has read those.
            rows = np.array([self.runner.input_batch.req_id_to_index[each] for each in entered])
            ends = np.array(list(entered.values()))
            for states in self.heads:
                states.head.clear(rows, np.zeros_like(ends), ends)

    def _scheduled(self, scheduler_output, batch: int) -> np.ndarray:
        """[batch] int64 tokens that the target computed in this step."""
        ids = self.runner.input_batch.req_ids[:batch]
        return np.array([scheduler_output.num_scheduled_tokens[i] for i in ids], dtype=np.int64)

    def _lengths(
        self, scheduled: np.ndarray, slots: np.ndarray, sampled: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Committed tokens of every request, and how many to draft for it.

        The target adds a token of its own to every draft, so a request never drafts the last
        token that max_tokens or max_model_len allow.
        """
        input_batch = self.runner.input_batch
        batch = len(sampled)
        length = np.where(
            sampled,
            input_batch.num_tokens_no_spec[:batch],
            input_batch.num_computed_tokens_cpu[:batch] + scheduled,
        ).astype(np.int64)
        generated = length - input_batch.num_prompt_tokens[:batch]
        max_tokens = self.requests.max_tokens[slots]
        left = np.minimum(self.max_model_len - length, max_tokens - generated)
        requested = np.clip(left - 1, 0, self.num_speculative_tokens)
        return length, np.where(sampled, requested, 0)
