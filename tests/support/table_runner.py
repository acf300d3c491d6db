"""The sampling side of vLLM's runner with tables in the place of models.

vLLM's own request table, sampler, drafter methods and rejection sampler run as in an engine; logits
of target and drafter are rows of a table that the last token chooses. So the distribution of a text
is known exactly.
"""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from support.exact_joint_distribution import next_token_distribution
from support.proposal_states import TableLevel
from vllm import SamplingParams
from vllm.v1.worker.gpu.input_batch import expand_idx_mapping, post_update
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_hsd.budget.source_choice import Estimates, SourcesLookup
from vllm_hsd.cascade.lookups import lookup_bigram, lookup_ngram
from vllm_hsd.cascade.ngram_rows import NgramRows
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.suffix_lookup import SuffixLookup
from vllm_hsd.cascade.text_order import order_texts
from vllm_hsd.cascade.text_store import TextStore, collect_texts
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.sizes import schedule_of, verifiers
from vllm_hsd.host.cascade_sampler import serve
from vllm_hsd.host.device_counts import DeviceCounts
from vllm_hsd.host.speculator import CascadeSpeculator

CPU = torch.device("cpu")
# Sampling parameters that change a distribution.
CASES = {
    "temperature 1": {},
    "greedy": {"temperature": 0.0},
    "temperature 0.7": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
    "top_k at 1.3": {"top_k": 4, "temperature": 1.3},
    "min_p": {"min_p": 0.15, "temperature": 1.2},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {1: 1.5, 3: -2.0}},
    "allowed tokens": {"allowed_token_ids": [0, 2, 3, 5]},
}


def table(seed: int, vocabulary: int, spread: float) -> torch.Tensor:
    """Normal logits [V, V] of standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(vocabulary, vocabulary)) * spread).float()


def tables(vocabulary=6, difference=0.7):
    target = table(0, vocabulary, 1.3)
    return target, target + difference * table(1, vocabulary, 1.0)


def cascade(name: str) -> dict:
    """Configuration of a cascade of tables, see `TableRunner`."""
    name, lengths = name.removesuffix(", adaptive"), name.endswith(", adaptive")
    target, draft = tables()
    low = {"model": draft, "num_tokens": 1}
    middle = {"model": target + 0.4 * table(2, len(target), 1.0)}
    high = {"model": target + 0.3 * table(3, len(target), 1.0)}
    ngram, bigram, pairs = {"ngram": {"max": 2}}, {"bigram": "counts.npz"}, {"bigram": "pairs"}
    counted = {"ngram_model": "pairs", "order": 2}
    one, two, entropy = {"num_tokens": 1}, {"num_tokens": 2}, {"stopping": "entropy"}
    unverified = {**middle, "verifier": "none"}
    levels = {
        "one": [{"model": draft}],
        "two": [low, middle],
        "three": [low, middle | two, high],
        "bigram": [bigram | one, middle],
        "suffix": [{"suffix": {"store": "pairs"}} | two, middle],
        "lookup": [ngram | one, middle],
        "lookup alone": [bigram],
        "sources": [{"sources": [ngram, bigram]} | two, middle],
        "choice": [{"sources": [ngram, pairs, {"model": draft}]}],
        "choice of n-grams": [{"sources": [ngram, counted]} | two, middle],
        "choice below": [{"sources": [pairs, {"model": draft}]} | two, middle],
        "unverified": [bigram | two, unverified],
        "entropy": [low | two | entropy, middle | entropy],
        "entropy, unverified": [low | two | entropy, unverified | entropy],
        "horizontal": [low, middle],
        "horizontal lookup": [ngram | one, middle | entropy],
        "n-grams": [counted | two, middle],
        "n-grams above": [ngram | one, counted | two, middle],
        "equal": [{"model": target} | one, {"model": target}],
    }[name]
    found = {"num_speculative_tokens": 4, "levels": levels}
    if "horizontal" in name:
        found["horizontal_tokens"] = 2
    return {**found, "adaptive": True} if lengths else found


class TableDrafter:
    """The methods that vLLM's drafters share; `compute_draft_logits` is given rows of a table."""

    _copy_request_inputs = DraftModelSpeculator._copy_request_inputs
    sample_draft = DraftModelSpeculator.sample_draft
    _maybe_predict_acceptance = DraftModelSpeculator._maybe_predict_acceptance

    def __init__(self, slots: int, length: int, vocabulary: int, keeps_rows: bool) -> None:
        self.temperature = torch.zeros(slots)
        self.seeds = torch.zeros(slots, dtype=torch.int64)
        self.idx_mapping = torch.zeros(slots, dtype=torch.int64)
        self.draft_logits = torch.zeros(slots, length, vocabulary) if keeps_rows else None
        self.use_local_argmax_reduction = self.use_fp64_gumbel = False
        self.draft_watermarker = self.acceptance_estimator = None
        self.draft_token_confidence_probs = torch.ones(slots, length)

    def compute_draft_logits(self, hidden_states, spec_step_idx):
        return hidden_states


class TableCascade(CascadeSpeculator):
    """The cascade without vLLM's models.

    Args:
        cascade: see `TableRunner`.
        req_states: vLLM's table of requests.
        draft: what a bigram level counts where there is no table.
    """

    max_model_len = 0  # a property of the configuration in vLLM 0.33

    def __init__(self, cascade: dict, req_states, draft: torch.Tensor) -> None:
        tables: list[torch.Tensor] = []
        given = [self._named(level, tables) for level in cascade["levels"]]
        tables = tables or [draft]
        self.hsd = CascadeConfig.parse({**cascade, "levels": given})
        self.schedule = schedule_of(self.hsd)
        self.scales = torch.tensor([options.temperature_scale for options in self.hsd.options()])
        self.req_states, self.hosted, self.draft_logits = req_states, [], None
        self.graphs, self.branches, self.checks = None, None, False
        self.asked: int | None = None  # by vLLM's scheduler, None for the configured number
        self.temperature = torch.zeros(req_states.max_num_reqs)
        self.seeds = self.idx_mapping = torch.zeros(req_states.max_num_reqs, dtype=torch.int64)
        self.max_model_len = req_states.max_model_len
        slots, vocabulary = req_states.max_num_reqs, len(tables[0])
        self.draft_tokens = torch.zeros(
            slots, self.schedule.num_speculative_tokens, dtype=torch.int64
        )
        lowest = self.hsd.levels[0]
        self.device, self.stale = CPU, np.zeros(slots, dtype=bool)
        self.max_num_reqs = slots
        self.state = ProposalState.allocate(
            self.schedule,
            batch=slots + 1,  # so that a CUDA graph has padding
            max_num_reqs=slots,
            vocab_size=vocabulary,
            dtypes=[
                None if level.last_drafts_by == "lookup" else torch.float32
                for level in self.hsd.levels
            ],
            num_kv_groups=1,
            device=CPU,
        )
        self.acceptance_estimator = self.confidence = self._confidence()
        self.draft_token_confidence_probs = torch.ones(self.draft_tokens.shape)
        self.thresholds = self._thresholds()
        self.shorter = self._shorter_states()
        self.several = self._several_drafts()
        self.counts = DeviceCounts(self.state.counts)
        self.blocks = torch.arange(slots * 16, dtype=torch.int32).view(slots, 16)
        groups = KVGroups(
            torch.tensor([self.blocks.data_ptr()], dtype=torch.uint64),
            torch.tensor([16]),
            torch.tensor([16], dtype=torch.int32),
        )
        lasts = [level.get("sources", [level])[-1] for level in cascade["levels"]]
        levels: list = [TableLevel(last["model"]) if "model" in last else None for last in lasts]
        self.lookup = None
        if lowest.drafts_by == "lookup":
            self.lookup, _ = self._lookup(lowest, tables[0])
        for k, level in enumerate(self.hsd.levels):
            last = level.drafters[-1]
            if last.kind == "ngram_model":
                levels[k] = NgramRows.of(pairs_of(tables[0]), last.order, CPU)
                levels[k].text = req_states.all_token_ids.gpu
        self.verifiers = verifiers(self.hsd)
        self._build_programs(levels, groups)

    def _named(self, level: dict, tables: list[torch.Tensor]) -> dict:
        """The level with names in the places of its tables, which are appended to the list."""
        if "sources" in level:
            sources = [self._named(source, tables) for source in level["sources"]]
            return {**level, "sources": sources}
        if "model" not in level:
            return level
        tables.append(level["model"])
        return {**level, "model": "table"}

    def _lookup(self, level, table: torch.Tensor):
        """What looks up, and its estimates as one of several sources."""
        if level.kind == "sources":
            found = [self._lookup(each, table) for each in level.sources if each.is_lookup]
            length, drafts = self.schedule.kept_lengths[0], level.last_drafts_by != "lookup"
            slots = self.req_states.max_num_reqs
            return SourcesLookup(found, level.min_acceptance, slots, length, CPU, drafts), None
        successor, probs = table.argmax(1), table.softmax(1).amax(1).double()
        if level.kind == "bigram":
            return (
                lambda state, text: lookup_bigram(state, successor.int()),
                Estimates(probs, by_token=True),
            )
        if level.kind == "suffix":
            store = order_texts(pairs_of(table), CPU)
            return SuffixLookup(store, level.suffix.min_acceptance, CPU), None
        keys = {"shortest": level.ngram.min, "longest": level.ngram.max}
        return partial(lookup_ngram, **keys), level.estimates(CPU)

    def drafts(self, slots: torch.Tensor, states, *num_tokens: torch.Tensor) -> torch.Tensor:
        """num_tokens: sampled and rejected ones."""
        count = len(slots)
        batch = SimpleNamespace(
            num_reqs=count,
            has_prefill=False,
            num_tokens_after_padding=0,
            idx_mapping=slots,
            idx_mapping_np=slots.numpy(),
            input_ids=slots[:0],
            positions=slots[:0],
            seq_lens_cpu_upper_bound=torch.zeros(count, dtype=torch.int32),
        )
        return self.propose(
            batch, {}, {}, None, None, *num_tokens, None, None, states.temperature.gpu,
            states.seeds.gpu, num_speculative_tokens=self.asked,
        )  # fmt: skip


def pairs_of(table: torch.Tensor) -> TextStore:
    """Every token with its likeliest successor, twice."""
    pairs = torch.stack((torch.arange(len(table)), table.argmax(1)), 1).repeat(2, 1)
    return collect_texts(pairs.numpy(), len(table))


class TableRunner:
    """Requests that generate with a drafter; all of them take part in every step.

    Args:
        target, draft: float32 [V, V], logits of the next token after each token.
        params: sampling parameters of each request.
        length: draft length K; with 0 the sampler draws without speculation.
        keeps_rows: whether the drafter samples and keeps its rows, or drafts its argmax.
        ours: whether our verifier replaces vLLM's.
        prompt_length: tokens 0 that every text starts with.
        cascade: as configured, of levels {"model": table [V, V]}, in the place of `draft`.
        couples_all: as of a configuration with "verifier": "coupled".
        drafter: vLLM's class of the drafter.
        adapts: whether drafts have confidences, for vLLM's adaptive verification.
    """

    def __init__(
        self,
        target: torch.Tensor,
        draft: torch.Tensor,
        params: list[dict],
        *,
        length: int,
        keeps_rows: bool = True,
        ours: bool = True,
        prompt_length: int = 1,
        cascade: dict | None = None,
        couples_all: bool = False,
        drafter: str = "StandaloneARSpeculator",
        adapts: bool = False,
    ) -> None:
        self.target, self.draft, self.length = target, draft, length
        self.count, vocabulary = len(params), len(target)
        self.states = RequestState(self.count, 64, 64, length, vocabulary, CPU)
        config = SimpleNamespace(reasoning_config=None, num_speculative_tokens=length)
        self.sampler = Sampler(
            config,
            self.count,
            vocabulary,
            CPU,
            self.states,
            num_speculative_tokens=length + 1,
        )
        spec_config = SimpleNamespace(
            num_speculative_tokens=length,
            enable_adaptive_verification=adapts,
            rejection_sample_method="block",
            fly_entropy_threshold=None,
            fly_entropy_top_k=None,
            hsd_couples_all=couples_all,
        )
        made = type(drafter, (TableDrafter,), {"__module__": "vllm.tables"})
        self.drafter = made(self.count, length, vocabulary, keeps_rows)
        if adapts:
            self.drafter.acceptance_estimator = OnlineAcceptanceEstimator(self.count, length, CPU)
        if cascade is not None:
            cascade = {**cascade, "enable_adaptive_verification": adapts}
            self.drafter = TableCascade(cascade, self.states, draft)
        self.runner = SimpleNamespace(
            sampler=self.sampler,
            rejection_sampler=RejectionSampler(self.sampler, spec_config, CPU),
            speculator=self.drafter,
            speculative_config=spec_config,
            req_states=self.states,
            batch_sharder=None,
            vocab_size=vocabulary,
            device=CPU,
            sample_tokens=None,
            draft_tokens_handler=SimpleNamespace(get_draft_tokens=None),
        )
        if ours:
            serve(self.runner)
        np.random.seed(0)  # requests without a seed get theirs from it
        for i, given in enumerate(params):
            self.states.add_request(str(i), prompt_length, [0] * prompt_length, 0, 64)
            slot = self.states.req_id_to_index[str(i)]
            self.sampler.add_request(slot, SamplingParams(**given, detokenize=False))
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        slots = [self.states.req_id_to_index[str(i)] for i in range(self.count)]
        self.slots = torch.tensor(slots)
        self.drafted: torch.Tensor | None = None
        self.accepted = self.verified = 0

    def step(self, invalid: torch.Tensor | None = None, logits=None):
        """One step of the target, then a proposal; returns vLLM's `SamplerOutput`.

        Args:
            invalid: bool [rows] as vLLM marks draft tokens that a grammar refuses.
            logits: called with the input tokens of the rows, in the place of the target's table.
        """
        batch = self.input_batch()
        rows = (logits or (lambda tokens: self.target[tokens]))(batch.input_ids.long())
        if self.drafted is None or self.length == 0:
            output = self.sampler(rows.clone(), batch)
        else:
            output = self.runner.rejection_sampler(
                rows.clone(), batch, self.drafter.draft_logits, invalid
            )
            self.verified += self.count * self.length
            self.accepted += int(output.num_sampled.sum()) - self.count
        post_update(
            self.slots,
            self.states.num_computed_tokens.gpu,
            self.states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            batch.query_start_loc,
            self.states.all_token_ids.gpu,
            self.states.total_len.gpu,
        )
        self.propose(output.num_sampled, output.num_rejected)
        return output

    def input_batch(self) -> SimpleNamespace:
        """The fields of vLLM's `InputBatch` that samplers read."""
        if self.drafted is None:
            tokens = self.states.all_token_ids.gpu[self.slots, :1].long()
        else:
            tokens = torch.cat((self.states.last_sampled_tokens[self.slots], self.drafted), 1)
        starts = torch.arange(self.count + 1, dtype=torch.int32) * tokens.shape[1]
        return self.batch_of(tokens, starts, starts.numpy(), starts)

    def batch_of(self, tokens, starts, host_starts, queries) -> SimpleNamespace:
        """Of [requests, n] tokens, of which each request has as many as `starts` says."""
        widths, longest, rows = starts.diff(), tokens.shape[1], int(starts[-1])
        committed = self.states.total_len.gpu[self.slots]
        inside = torch.arange(longest) < widths[:, None]
        positions = (committed - 1)[:, None] + torch.arange(longest)
        expanded, local = expand_idx_mapping(self.slots, rows, starts, longest)
        return SimpleNamespace(
            num_reqs=self.count,
            input_ids=tokens[inside].int(),
            positions=positions[inside].long(),
            logits_indices=torch.arange(rows),
            idx_mapping=self.slots,
            idx_mapping_np=self.slots.numpy(),
            expanded_idx_mapping=expanded,
            expanded_local_pos=local,
            cu_num_logits=starts,
            cu_num_logits_np=host_starts,
            query_start_loc=queries,
            seq_lens=(committed + widths - 1).int(),
            seq_lens_cpu_upper_bound=(committed + longest - 1).int(),
            num_draft_tokens=rows - self.count,
        )

    def propose(self, *num_tokens: torch.Tensor) -> None:
        if isinstance(self.drafter, TableCascade):
            states = self.sampler.sampling_states
            drafted = self.drafter.drafts(self.slots, states, *num_tokens).clone()
            self.drafted = drafted[:, : self.drafter.asked or None]
            return
        drafter, states = self.drafter, self.sampler.sampling_states
        drafter._copy_request_inputs(
            self.count, self.slots, states.temperature.gpu, states.seeds.gpu
        )
        token = self.states.last_sampled_tokens[self.slots, 0]
        if self.length == 0:
            self.drafted = token[:, None][:, :0]
            return
        columns = []
        for step in range(self.length):
            token = drafter.sample_draft(
                self.draft[token],
                self.states.total_len.gpu[self.slots].long() - 1 + step,
                drafter.idx_mapping,
                drafter.temperature,
                drafter.seeds,
                torch.tensor(step),
                drafter.draft_logits,
            )
            columns.append(token)
        self.drafted = torch.stack(columns, 1)

    def texts(self) -> list[list[int]]:
        """Tokens of every request, the prompt included."""
        lengths = self.states.total_len.gpu[self.slots].tolist()
        rows = self.states.all_token_ids.gpu[self.slots].tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def joint(params, length):
    """Exact distribution of the first `length` tokens after token 0 of the target's table."""
    target, _ = tables()
    distribution = {}
    for outcome in itertools.product(range(len(target)), repeat=length):
        probability, text = 1.0, [0]
        for t, token in enumerate(outcome):
            row = next_token_distribution(
                target[text[-1]].double().numpy(), [0], outcome[:t], params, None
            )
            probability *= row[token]
            text.append(token)
        if probability > 0:
            distribution[outcome] = probability
    return distribution
