"""The cascade as a proposer of vLLM's V1 runner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.forward_context import set_forward_context
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from vllm_hsd.core.cascade import Cascade, DraftBatch, LevelOptions, LevelStats
from vllm_hsd.core.stopping import EntropyThresholds
from vllm_hsd.runner_v1.level_kinds import build_level
from vllm_hsd.runner_v1.levels import ModelLevel
from vllm_hsd.runner_v1.replacements import complete_logits_processors, take_over_runner
from vllm_hsd.runner_v1.requests import PendingDraft, RequestTable
from vllm_hsd.runner_v1.sampler import HsdSampler
from vllm_hsd.runner_v1.sampling import RequestSampling


class CascadeProposer(DraftModelProposer):
    """Drafts with a cascade wherever the runner expects a draft model.

    It subclasses `DraftModelProposer` so that the runner's isinstance checks pass, and never runs
    its __init__, which allocates the buffers of a single drafter.
    """

    def __init__(self, vllm_config, device: torch.device, runner) -> None:
        self.vllm_config, self.device, self.runner = vllm_config, device, runner
        self.speculative_config = vllm_config.speculative_config
        hsd = self.speculative_config.hsd
        self.max_model_len = vllm_config.model_config.max_model_len
        self.kv_cache_gid = 0
        self.draft_attn_groups = []
        self.hosted = [
            build_level(level, runner, vllm_config, i) for i, level in enumerate(hsd.levels)
        ]
        self.model_levels = [level for level in self.hosted if isinstance(level, ModelLevel)]
        self.plans = [
            LevelOptions(
                draft_length=budget,
                verifier=level.verifier or hsd.verifier,
                max_rounds=level.max_rounds,
                stopping=level.stopping,
                temperature_scale=level.temperature_scale,
            )
            for budget, level in zip(hsd.draft_lengths, hsd.levels, strict=True)
        ]
        self.use(list(range(len(self.hosted))), hsd.draft_lengths)
        take_over_runner(self, runner)

    def use(self, levels: list[int], draft_lengths: list[int]) -> None:
        """Serve the next requests with some of the hosted levels: one engine compares cascades.

        Only between requests: what is known of those under way is forgotten.

        Args:
            levels: numbers of the levels, cheapest first.
            draft_lengths: tokens that each hands up; the last is the draft that the target verifies.

        Raises:
            ValueError: unknown levels, or draft_lengths that the engine was not started for.
        """
        hsd, hosted = self.speculative_config.hsd, range(len(self.hosted))
        if not levels or len(set(levels)) < len(levels) or not set(levels) <= set(hosted):
            raise ValueError(f"levels {levels} are no cascade of the {len(hosted)} hosted.")
        if len(draft_lengths) != len(levels) or min(draft_lengths) < 1:
            raise ValueError(
                f"draft_lengths {draft_lengths} do not give every one of levels {levels} a token."
            )
        if draft_lengths[-1] > hsd.num_speculative_tokens:
            raise ValueError(
                f"draft_lengths {draft_lengths} end above num_speculative_tokens={hsd.num_speculative_tokens}."
            )
        self.in_use = levels
        plans = [
            replace(self.plans[i], draft_length=b)
            for i, b in zip(levels, draft_lengths, strict=True)
        ]
        self.cascade = Cascade([self.hosted[i] for i in levels], plans, hsd.horizontal_tokens)
        self.requests = RequestTable(len(levels), self.vllm_config.model_config.seed)
        self.num_speculative_tokens = draft_lengths[-1]

    def take_stats(self) -> list[LevelStats]:
        """Counts of every hosted level since the last call."""
        stats = [LevelStats() for _ in self.hosted]
        for i, counted in zip(self.in_use, self.cascade.take_stats(), strict=True):
            stats[i] = counted
        return stats

    def load_model(self, target_model) -> None:
        configs = self.speculative_config.level_configs
        for level, config in zip(self.hosted, configs, strict=True):
            if config is None:
                level.attach(target_model)
            else:
                level.load(self._draft_vllm_config(config), config.draft_load_config)
        complete_logits_processors(self.runner)
        self.runner.rejection_sampler = HsdSampler(self)

    def _draft_vllm_config(self, level_config):
        """vLLM's own way from a target's configuration to a drafter's, for one level."""
        own, self.speculative_config = self.speculative_config, level_config
        try:
            return self._create_draft_vllm_config()
        finally:
            self.speculative_config = own

    def initialize_attn_backend(self, kv_cache_config, kernel_block_sizes=None) -> None:
        for level in self.model_levels:
            level.init_attention(kv_cache_config, kernel_block_sizes)
        self.draft_attn_groups = [g for level in self.model_levels for g in level.attention_groups]

    def initialize_cudagraph_keys(self, cudagraph_mode) -> None:
        """Levels run without CUDA graphs on this runner."""

    def validate_same_kv_cache_group(self, kv_cache_config) -> None:
        """Levels may lie in several KV-cache groups: nothing to check."""

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
                level.run(input_ids, positions)

    def request_slots(self, count: int) -> np.ndarray:
        """[count] slots in `requests` of the first `count` requests of the batch."""
        runner = self.runner
        ids = runner.input_batch.req_ids[:count]
        return self.requests.slots(ids, [_seed(runner.requests[i]) for i in ids])

    @torch.inference_mode()
    def propose_draft_token_ids(
        self, scheduler_output, sampled_token_ids, sampling_metadata, *unused
    ) -> list[list[int]]:
        """Draft for the requests that have just sampled, fill the caches for all others.

        Takes the place of the runner's method of the same name; runs after bookkeeping, so
        `sampled_token_ids` are lists and the batch already holds them.
        """
        input_batch = self.runner.input_batch
        slots = self.request_slots(input_batch.num_reqs)
        sampled = np.array([len(ids) > 0 for ids in sampled_token_ids])
        length, want = self._lengths(scheduler_output, sampled)
        # Whatever a level computed behind the last accepted token is forgotten; a level without
        # a cache of its own is always up to date.
        kv = np.minimum(self.requests.kv[:, slots], length - sampled)
        kv[[not level.keeps_cache for level in self.cascade.levels]] = length - sampled
        laws = RequestSampling(
            sampling_metadata, [plan.temperature_scale for plan in self.cascade.plans]
        )
        table = self.requests.thresholds
        thresholds = EntropyThresholds(table.total[:, slots], table.count[:, slots])
        batch = DraftBatch(
            tokens=input_batch.token_ids_cpu,
            rows=np.arange(len(slots)),
            length=length,
            kv=kv,
            eos=self._eos(len(slots)),
            greedy=laws.greedy and not laws.masks,
            probs=laws.draft_probabilities,
            uniforms=lambda who, counts, level: self.requests.coins(slots[who], counts, level),
            thresholds=thresholds,
        )
        idle = np.flatnonzero(want == 0)
        self.cascade.ingest(batch, idle, (length - sampled)[idle])
        proposal = self.cascade.propose(batch, want)
        self.requests.kv[:, slots] = kv
        table.total[:, slots], table.count[:, slots] = thresholds.total, thresholds.count
        for row, slot in enumerate(slots):
            self.requests.pending[slot] = PendingDraft(proposal, row) if want[row] else None
        return [
            ids[:count].tolist()
            for ids, count in zip(proposal.token_ids, proposal.counts, strict=True)
        ]

    def follow_scheduler(self, scheduler_output) -> None:
        """Take note of requests that left, joined or came back since the last step."""
        for request_id in scheduler_output.finished_req_ids:
            self.requests.remove(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            state = self.runner.requests[request.req_id]
            self.requests.remove(request.req_id)
            self.requests.restart(request.req_id, _seed(state), request.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            if request_id in cached.resumed_req_ids:
                state = self.runner.requests[request_id]
                self.requests.restart(request_id, _seed(state), cached.num_computed_tokens[i])

    def _lengths(self, scheduler_output, sampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Committed tokens of every request, and how many to draft for it.

        The target adds a token of its own to every draft, so a request never drafts the last
        token that max_tokens or max_model_len allow.
        """
        input_batch = self.runner.input_batch
        batch = len(sampled)
        scheduled = np.array(
            [scheduler_output.num_scheduled_tokens[i] for i in input_batch.req_ids[:batch]]
        )
        length = np.where(
            sampled,
            input_batch.num_tokens_no_spec[:batch],
            input_batch.num_computed_tokens_cpu[:batch] + scheduled,
        ).astype(np.int64)
        max_tokens = np.array(
            [self._max_tokens(i) for i in input_batch.req_ids[:batch]], dtype=np.int64
        )
        generated = length - input_batch.num_prompt_tokens[:batch]
        left = np.minimum(self.max_model_len - length, max_tokens - generated)
        want = np.clip(left - 1, 0, self.num_speculative_tokens)
        return length, np.where(sampled, want, 0)

    def _max_tokens(self, request_id: str) -> int:
        params = self.runner.requests[request_id].sampling_params
        return self.max_model_len if params.max_tokens is None else params.max_tokens

    def _eos(self, count: int) -> np.ndarray:
        """[count] token that ends each request, -1 where it is ignored or there is none."""
        ids = self.runner.input_batch.req_ids[:count]
        params = [self.runner.requests[i].sampling_params for i in ids]
        return np.array(
            [-1 if p.ignore_eos or p.eos_token_id is None else p.eos_token_id for p in params]
        )


def _seed(request_state) -> int | None:
    params = request_state.sampling_params
    return None if params is None else params.seed
