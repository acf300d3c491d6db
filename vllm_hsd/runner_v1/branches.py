"""Several drafts of a request in one pass of the target on the V1 runner.

The layout is that of `core.row_layout`. What vLLM prepares for a flat list of draft tokens is
changed in four places: positions and slots of branches' tokens, the rows of the attention's
metadata, the blocks that hold the text before a root, which every branch gets a copy of, and every
layer's update of its KV cache, which writes what branches share to all of them before anything
attends to it. After verification the blocks of the branch that the text follows are copied back,
before anything is drafted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.logger import init_logger

from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.row_layout import PrivateBlocks, Rows, flat_tokens, lay_out
from vllm_hsd.errors import UserError
from vllm_hsd.runner_v1.hooks import (
    NO_PLUGIN_API,
    NONE_FILED,
    RUNNER,
    replace_on,
    replaces_on_runner,
)

logger = init_logger(f"vllm.{__name__}")
_PREPARE = f"{RUNNER}._prepare_inputs"
_BUILD = "vllm.v1.worker.utils.AttentionGroup.build_metadata"
_WRITE = "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update"


class BranchingState(Protocol):
    """What hosting branches shares with the proposer."""

    runner: Any
    vllm_config: Any
    cascade: Cascade
    model_levels: list

    def request_slots(self, count: int) -> np.ndarray:
        """[count] slots of the first `count` requests of the batch."""


class Followed(NamedTuple):
    """What became of the drafts of a step with branches.

    Attributes:
        places: [batch, L + 1] int64, where the tokens of the row that holds the new text are among
            its request's, the root first; None where no branch won.
        kept: [batch] int64 draft tokens of that row that are part of the text now.
        of_chain: [batch] int64, leading ones of them that are the chain's.
    """

    places: np.ndarray | None
    kept: np.ndarray
    of_chain: np.ndarray


class HostedBranches:
    """The branches of a runner's requests.

    Args:
        state: the proposer.
        most: drafts of a request that the target verifies together, at most.
        length: longest draft.

    Attributes:
        rows: of the step that runs; None without branches.
        followed: what became of the last step's drafts; None without branches.
    """

    def __init__(self, state: BranchingState, most: int, length: int) -> None:
        self.state, self.runner = state, state.runner
        self.most, self.length = most, length
        self.rows: Rows | None = None
        self.followed: Followed | None = None
        self.groups: list[PrivateBlocks] = []
        self.tables: list[np.ndarray] = []
        # By group, what is written of the flat batch and its slots: shared tokens several times.
        self.written: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        self.caches: list[list[Any]] = []
        config = state.vllm_config
        for mistake in config.speculative_config.branch_mistakes(config):
            raise UserError(mistake)
        if config.compilation_config.cudagraph_mode.has_full_cudagraphs():
            raise UserError(
                "levels[0].branches does not run with full CUDA graphs on the V1 runner: set "
                "cudagraph_mode to PIECEWISE."
            )

    def install(self, kv_cache_config) -> None:
        """Take part in what the runner prepares for a forward pass.

        Raises:
            UserError: the KV cache has no room for branches, or is of a kind that cannot be copied
                block by block.
        """
        config = self.state.vllm_config
        size = config.cache_config.block_size
        configured, self.most = (
            self.most,
            config.speculative_config.rows(
                config, kv_cache_config.num_blocks, len(kv_cache_config.kv_cache_groups)
            ),
        )
        if self.most < configured:
            logger.info(
                "A request has %d drafts at most: the KV cache or max_model_len lacks room for "
                "%d of max_num_seqs=%d requests.",
                self.most,
                configured,
                config.scheduler_config.max_num_seqs,
            )
        replace_on(self.runner, _PREPARE, by=self)
        for group in (group for groups in self.runner.attn_groups for group in groups):
            if group.kernel_block_size is not None or group.kv_cache_spec.block_size > size:
                raise UserError(
                    "levels[0].branches does not run with the KV-cache layout that vLLM chose for "
                    f"{group.backend.get_name()}: set it to 1."
                )
            replace_on(group, _BUILD, by=self)
            for builder in group.metadata_builders:
                # It would take another group's rows for this group's.
                builder.supports_update_block_table = False
            for name in group.layer_names:
                attention = self.runner.compilation_config.static_forward_context[name].impl
                if group.backend.forward_includes_kv_cache_update or group.backend.is_mla():
                    raise UserError(
                        "levels[0].branches does not run with attention by "
                        f"{group.backend.get_name()}: set it to 1."
                    )
                replace_on(attention, _WRITE, by=(self, group.kv_cache_group_id))

    def prepare(self, scheduled: np.ndarray) -> None:
        """Give every branch of the batch its positions, its slots and its share of the text.

        Args:
            scheduled: [batch] tokens of each request.
        """
        self.rows = self.followed = None
        input_batch, store = self.runner.input_batch, self.state.cascade.branches
        if store is None:
            return
        slots = self.state.request_slots(len(scheduled))
        if not store.counts[slots].any():
            return
        base = input_batch.num_computed_tokens_cpu[: len(slots)].astype(np.int64)
        rows = self._lay_out(slots, scheduled.astype(np.int64), base)
        if not rows.branch.any():
            return
        self._find_caches()
        self.rows, self.tables, self.written = rows, [], []
        tokens = torch.arange(int(scheduled.sum()), device=self.runner.device)
        for gid, (group, table) in enumerate(
            zip(self.groups, input_batch.block_table.block_tables, strict=True)
        ):
            tables = group.tables(rows, table.block_table.np[: len(slots)])
            places, positions, kv_slots = group.slots(rows, tables)
            index = torch.from_numpy(places).to(self.runner.device)
            self.runner.positions[index] = torch.from_numpy(positions).to(self.runner.device)
            all_slots = table.slot_mapping.gpu
            all_slots[index] = torch.from_numpy(kv_slots).to(self.runner.device)
            self.tables.append(tables)
            shared = (torch.from_numpy(each) for each in group.repeated(rows, tables))
            of_all, kept_in = (each.to(self.runner.device) for each in shared)
            where = torch.cat([all_slots[: len(tokens)], kept_in.to(all_slots.dtype)])
            self.written.append((torch.cat([tokens, of_all]), where) if len(of_all) else None)
            self._copy(gid, *group.copied_before(rows, tables))

    def metadata(self, common, gid: int):
        """vLLM's metadata of the batch, with a row for each of its rows."""
        rows = self.rows
        if rows is None:
            return common
        device = self.runner.device
        starts = torch.from_numpy(np.append(rows.start, rows.tokens.sum()).astype(np.int32))
        ends = torch.from_numpy((rows.begin + rows.tokens).astype(np.int32))
        prefix, images = common.rswa_prefix_lens, common.mm_req_doc_ranges
        request = torch.from_numpy(rows.request)
        return replace(
            common,
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(device),
            seq_lens_cpu_upper_bound=ends,
            num_reqs=len(rows.start),
            max_query_len=int(rows.tokens.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=torch.from_numpy(self.tables[gid]).to(device),
            is_prefilling=common.is_prefilling[request],
            rswa_prefix_lens=None if prefix is None else prefix[request],
            mm_req_doc_ranges=images
            and {i: images[r] for i, r in enumerate(rows.request.tolist())},
        )

    def of_logits(self, counts: np.ndarray) -> Rows | None:
        """The rows of the step, in the order of the target's logits; None without branches.

        Args:
            counts: [batch] int64, scheduled draft tokens of each request.
        """
        rows = self.rows
        if rows is None:
            return None
        if (np.bincount(rows.request, rows.tokens, len(counts)) == counts + 1).all():
            return rows
        # Of a prompt only the last token has logits.
        base = np.zeros(len(counts), dtype=np.int64)
        return self._lay_out(self.state.request_slots(len(counts)), counts + 1, base)

    def finish(self, winner: np.ndarray, kept: np.ndarray, of_chain: np.ndarray) -> None:
        """Copy what the winning branches computed to where the text is.

        Args:
            winner: [batch] int64, the row that holds the new text, 0 for the chain.
            kept: [batch] int64 draft tokens of it that are part of the text now.
            of_chain: [batch] int64, leading ones of them that are the chain's.
        """
        rows, self.rows = self.rows, None
        assert rows is not None
        won = np.flatnonzero(winner)
        places = rows.places[np.arange(len(winner)), winner] if len(won) else None
        self.followed = Followed(places, kept, of_chain)
        slots, more = self.state.request_slots(len(winner)), np.maximum(kept - of_chain, 0)
        self.state.cascade.record_branches(slots, winner, more)
        if len(won):
            numbers = rows.number(won, winner[won])
            for gid, (group, tables) in enumerate(zip(self.groups, self.tables, strict=True)):
                self._copy(gid, *group.copied_after(rows, tables, numbers, kept[won]))

    def make_room(self, slots: np.ndarray, base: np.ndarray, requested: np.ndarray) -> None:
        """Say how long the branches may be that are drafted now.

        Args:
            slots: [batch] int64.
            base: [batch] int64, position of each request's last token.
            requested: [batch] int64, most tokens of a draft.
        """
        store = self.state.cascade.branches
        if store is None:
            return
        self._find_caches()
        store.most = self.most
        # vLLM reserves nothing past max_model_len.
        most = self.state.vllm_config.model_config.max_model_len
        room = np.where(self._one_row(base), 0, requested)
        for group in self.groups:
            fits = group.first(base, self.most) * group.block_size <= most
            room = np.where(fits, np.minimum(room, group.room(base)), 0)
        store.room[slots] = room

    def flat_drafts(self, slots: np.ndarray) -> list[list[int]]:
        """The draft tokens to schedule for every request in [batch] slots, the chain's first."""
        drafts, store = self.state.cascade.drafts[-1], self.state.cascade.branches
        counts = drafts.counts[slots].tolist()
        chains = drafts.token_ids[slots].tolist()
        chains = [chain[:count] for chain, count in zip(chains, counts, strict=True)]
        if store is None or not store.counts[slots].any():
            return chains
        branches = (store.token_ids, store.counts, store.shared)
        each = (kept[slots].tolist() for kept in branches)
        return [flat_tokens(*request) for request in zip(chains, *each, strict=True)]

    def _one_row(self, base: np.ndarray) -> np.ndarray:
        """[batch] bool, requests that must do without branches.

        vLLM reads the list of draft tokens as one chain where a grammar or a thinking budget
        follows it, and counts places in it while min_tokens are ahead.
        """
        input_batch, found = self.runner.input_batch, np.zeros(len(base), dtype=bool)
        generated = base + 1 - input_batch.num_prompt_tokens[: len(base)]
        for i, request_id in enumerate(input_batch.req_ids[: len(base)]):
            params = self.runner.requests[request_id].sampling_params
            chained = params.structured_outputs or params.thinking_token_budget is not None
            found[i] = bool(chained) or params.min_tokens > generated[i]
        return found

    def _lay_out(self, slots: np.ndarray, scheduled: np.ndarray, base: np.ndarray) -> Rows:
        drafts, store = self.state.cascade.drafts[-1], self.state.cascade.branches
        assert store is not None
        return lay_out(scheduled, base, drafts.counts[slots], store, slots)

    def _find_caches(self) -> None:
        """The KV caches of the target's layers: a level keeps its own in the chain's blocks."""
        if self.caches:
            return
        runner, config = self.runner, self.runner.kv_cache_config
        own = set().union(
            *(level.layer_names for level in self.state.model_levels if level.keeps_cache)
        )
        layers = runner.compilation_config.static_forward_context
        tables = runner.input_batch.block_table.block_tables
        for group, table in zip(config.kv_cache_groups, tables, strict=True):
            self.groups.append(PrivateBlocks(table.block_size, self.length))
            ratio = group.kv_cache_spec.block_size // table.block_size
            # Layers may share a cache.
            found = {
                layers[name].kv_cache.data_ptr(): layers[name].kv_cache
                for name in group.layer_names
                if name not in own
            }
            blocks = config.num_blocks * ratio
            caches = [kv.movedim(kv.shape.index(blocks), 0) for kv in found.values()]
            if runner.device.type == "cpu":
                # NumPy copies a block at the speed of memory, torch takes half as long again.
                caches = [kv.view(blocks, -1).view(torch.uint8).numpy() for kv in caches]
            self.caches.append(caches)

    def _copy(self, gid: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy blocks of a KV-cache group in all layers of the target."""
        pairs = list(zip(sources.tolist(), targets.tolist(), strict=True))
        for cache in self.caches[gid]:
            for source, target in pairs:
                cache[target] = cache[source]


@replaces_on_runner(
    _PREPARE,
    ("self", "scheduler_output", "num_scheduled_tokens"),
    why="gives the branches of a draft positions, slots and blocks of their own",
    until=NO_PLUGIN_API,
    issue=NONE_FILED,
)
def prepare_inputs(original, hosted: HostedBranches, scheduler_output, num_scheduled_tokens):
    prepared = original(scheduler_output, num_scheduled_tokens)
    hosted.prepare(num_scheduled_tokens)
    return prepared


@replaces_on_runner(
    _BUILD,
    ("self", "common_attn_metadata", "ubatch_idx", "common_prefix_len", "kwargs"),
    why="shows attention a row for every branch of a draft",
    until=NO_PLUGIN_API,
    issue=NONE_FILED,
)
def build_metadata(original, hosted: HostedBranches, common, *args, **kwargs):
    return original(hosted.metadata(common, original.__self__.kv_cache_group_id), *args, **kwargs)


@replaces_on_runner(
    _WRITE,
    ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
    why="writes keys and values of tokens that branches share to the blocks of all of them",
    until="vLLM's attention reads a tree of draft tokens",
    issue=NONE_FILED,
)
def write_keys_and_values(original, of_group, layer, key, value, kv_cache, slot_mapping):
    hosted, gid = of_group
    if hosted.rows is not None and (written := hosted.written[gid]) is not None:
        places, slot_mapping = written
        key, value = key.index_select(0, places), value.index_select(0, places)
    original(layer, key, value, kv_cache, slot_mapping)
