"""Drafters of tables, for `table_runner`: the methods of vLLM's, and cascades as configured."""

from types import SimpleNamespace

import numpy as np
import torch
from support.proposal_states import TableLevel, state_of
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_hsd.budget.source_choice import Estimates, SourcesLookup
from vllm_hsd.cascade.bigram_rows import BigramRows
from vllm_hsd.cascade.lookups import lookup_bigram
from vllm_hsd.cascade.proposal_state import KVGroups
from vllm_hsd.cascade.suffix_lookup import SuffixLookup
from vllm_hsd.cascade.text_order import order_texts
from vllm_hsd.cascade.text_store import TextStore, collect_texts
from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.config.sizes import schedule_of
from vllm_hsd.host.device_counts import DeviceCounts
from vllm_hsd.host.speculator import CascadeSpeculator

CPU = torch.device("cpu")


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
    counted = {"bigram_model": "pairs"}
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
        "choice of pairs": [{"sources": [ngram, counted]} | two, middle],
        "choice below": [{"sources": [pairs, {"model": draft}]} | two, middle],
        "unverified": [bigram | two, unverified],
        "entropy": [low | two | entropy, middle | entropy],
        "entropy, unverified": [low | two | entropy, unverified | entropy],
        "horizontal": [low, middle],
        "horizontal lookup": [ngram | one, middle | entropy],
        "pairs": [counted | two, middle],
        "pairs above": [ngram | one, counted | two, middle],
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
    """The cascade without vLLM's models; a bigram level counts `draft` where there is no table."""

    max_model_len = 0  # a property of the configuration in vLLM 0.33
    has_placeholders = True
    names = "request"

    def __init__(self, cascade: dict, req_states, draft: torch.Tensor) -> None:
        tables: list[torch.Tensor] = []
        given = [self._named(level, tables) for level in cascade["levels"]]
        tables = tables or [draft]
        self.hsd = CascadeConfig.parse({**cascade, "levels": given})
        self.schedule = schedule_of(self.hsd)
        self.scales = torch.tensor([options.temperature_scale for options in self.hsd.options()])
        self.req_states, self.hosted, self.draft_logits = req_states, [], None
        self.graphs = self.branches = None
        self.asked: int | None = None  # by vLLM's scheduler, None for the configured number
        self.temperature = torch.zeros(req_states.max_num_reqs)
        self.seeds = self.idx_mapping = torch.zeros(req_states.max_num_reqs, dtype=torch.int64)
        self.max_model_len = req_states.max_model_len
        slots, vocabulary = req_states.max_num_reqs, len(tables[0])
        self.vocab_size = vocabulary
        self.draft_tokens = torch.zeros(
            slots, self.schedule.num_speculative_tokens, dtype=torch.int64
        )
        lowest = self.hsd.levels[0]
        self.device, self.stale = CPU, np.zeros(slots, dtype=bool)
        self.max_num_reqs = slots
        kind = {"lookup": lowest.last_drafts_by == "lookup", "slots": slots}
        # With a row more, so that a CUDA graph has padding.
        self.state = state_of(self.schedule, slots + 1, vocabulary, torch.float32, **kind)
        self.acceptance_estimator = self.confidence = self._confidence()
        self.draft_token_confidence_probs = torch.ones(self.draft_tokens.shape)
        self.thresholds = self._thresholds()
        self.shorter = self._shorter_states()
        self.several = self._several_drafts()
        self.counts = DeviceCounts(self.state.counts, ["levels[0]"])
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
            if last.kind == "bigram_model":
                levels[k] = BigramRows.of(pairs_of(tables[0]), torch.float32, CPU)
        self._build_programs(self._levels(levels), groups)

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
        return level.build(self, 0), level.estimates(CPU)

    def drafts(self, slots: torch.Tensor, states, *num_tokens: torch.Tensor) -> torch.Tensor:
        """num_tokens: sampled and rejected ones."""
        count = len(slots)
        batch = SimpleNamespace(
            num_reqs=count,
            req_ids=[f"{self.names} {slot}" for slot in slots.tolist()],
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
