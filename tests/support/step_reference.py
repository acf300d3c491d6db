"""The steps of cascade_steps.py in plain Python on the same `ProposalState`, request by request.

Arguments are those of the steps, whose names they have.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import torch

from vllm_hsd.cascade.counters import Count
from vllm_hsd.cascade.schedule import Draft, Verify, first_draw
from vllm_hsd.kernels.naive import filtered
from vllm_hsd.kernels.step_kernels import INVALID
from vllm_hsd.tools.planner.prompt_lookup import propose
from vllm_hsd.tools.reference.stopping import entropy_nats


def steps(tables) -> SimpleNamespace:
    """All of them; tables: what groups.table_ptrs points at, int32 [slots, blocks]."""
    return SimpleNamespace(**globals() | {"place": partial(place, tables=tables)})


def stage(
    state,
    schedule,
    *,
    index,
    text,
    length,
    num_sampled,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    most_drafted,
    scales,
    max_model_len,
):
    state.row_of_slot.fill_(-1)
    state.num_reqs[0] = len(index)
    top, window = schedule.num_levels - 1, schedule.window
    longest, own = schedule.num_speculative_tokens, schedule.draft_lengths[-1]
    for b in range(state.batch):
        slot = int(index[b]) if b < len(index) else -1
        n = int(length[slot]) if slot >= 0 else 0
        drafts = slot >= 0 and int(num_sampled[b]) > 0 and n >= window
        room = min(
            max_model_len - schedule.margin - n,
            max(int(most_drafted[slot]) - schedule.horizontal_tokens, 0),
        )
        requested = max(min(own, room), 0) if drafts else 0
        state.slot[b] = slot
        state.base[b] = n - window if drafts else 0
        state.window[b, :window] = text[slot, n - window : n] if drafts else 0
        state.end[b] = window
        last = n + longest - 2 if requested else n - 1
        state.limit[b] = min(last, max_model_len - 1) if drafts else -1
        state.start[top, b], state.drafted[top, b], state.requested[top, b] = window, 0, requested
        _request_below(state, schedule.draft_lengths, top, b)
        state.temperature[:, b] = temperature[slot] * scales if slot >= 0 else 0
        state.top_k[b] = top_k[slot] if slot >= 0 else 0
        state.top_p[b] = top_p[slot] if slot >= 0 else 1
        state.min_p[b] = min_p[slot] if slot >= 0 else 0
        state.seeds[b] = seeds[slot] if slot >= 0 else 0
        state.draws[b] = first_draw(n)
        if slot >= 0:
            state.row_of_slot[slot] = b
            state.counts[-1, Count.accepted] += max(int(num_sampled[b]) - 1, 0)


def place(state, schedule, op, groups, max_model_len, *, committed_too=True, lanes=0, tables):
    num_reqs, q = int(state.num_reqs), op.query_length
    top = schedule.num_levels - 1
    for b in range(state.batch):
        end = int(state.end[b])
        if isinstance(op, Verify):
            end = int(state.start[op.level - 1, b]) + op.draft_length
        state.query_start_loc[b : b + 2] = torch.tensor([b, b + 1]).clamp_max(num_reqs) * q
        base = int(state.base[b])
        state.seq_lens[b] = min(base + end, max_model_len) if b < num_reqs else 0
        running = bool(state.drafted[top, b] < state.requested[top, b])
        running |= int(state.limit[b]) == base + schedule.window - 1
        running &= int(state.slot[b]) >= 0
        for i in range(q):
            index = end - q + i
            position = base + index
            at = b * q + i
            known = min(index, int(state.end[b]) - 1)
            token = max(int(state.window[b, known]), 0) if index >= 0 else 0
            state.input_ids[at] = token
            state.positions[at] = min(max(position, 0), max_model_len - 1)
            written = running and index >= 0 and position <= int(state.limit[b])
            written = written and (committed_too or index >= schedule.window - 1)
            for g, table in enumerate(tables):
                block, offset = divmod(position, int(groups.block_sizes[g]))
                state.slot_mapping[g, at] = (
                    int(table[state.slot[b], block]) * int(groups.block_sizes[g]) + offset
                    if written
                    else -1
                )
            if isinstance(op, Verify) and i >= q - op.draft_length - 1:
                state.sampled[(b + 1) * (op.draft_length + 1) - (q - i)] = token
        if isinstance(op, Verify):
            has_room = state.drafted[op.level, b] < state.requested[op.level, b]
            state.origin[b] = state.drafted[op.level, b] if has_room else -1


def commit_draft(state, op, logits, token_ids, lse, thresholds):
    rows = state.rows[0]
    assert rows is not None
    logits = filtered(logits, state.temperature[0], thresholds)
    for b in range(state.batch):
        if op.step >= state.requested[0, b]:
            continue
        place = int(state.start[0, b]) + op.step
        state.window[b, place] = token_ids[b]
        if state.temperature[0, b] > 0:
            rows[b, op.step] = logits[b]
        state.lse[0][b, op.step] = lse[b]
        state.end[b], state.drafted[0, b] = place + 1, op.step + 1
        state.counts[0, INVALID.value] += int(not lse[b].isfinite())


def commit_verify(state, op, logits, result, thresholds):
    k, width = op.level, op.draft_length + 1
    rows = state.rows[k]
    assert rows is not None
    logits = filtered(logits, state.temperature[k].repeat_interleave(width), thresholds)
    for b in range(state.batch):
        origin = int(state.origin[b])
        if origin < 0:
            continue
        accepted, emitted = int(result.num_accepted[b]), int(result.num_emitted[b])
        begin = int(state.start[k, b]) + origin
        if emitted > accepted:
            state.window[b, begin + accepted] = result.token_ids[b, accepted]
        if state.temperature[k, b] > 0:
            rows[b, origin : origin + emitted] = logits[b * width : b * width + emitted]
        lse = result.target_lse[b, :emitted]
        state.lse[k][b, origin : origin + emitted] = lse
        drafted = int(state.drafted[k - 1, b])
        state.counts[k - 1, Count.drafted] += drafted
        state.counts[k - 1, Count.rounds] += int(drafted > 0)
        state.counts[k - 1, Count.accepted] += accepted
        state.counts[k, INVALID.value] += int((~lse.isfinite()).sum()) + accepted + 1 - emitted
        state.end[b], state.drafted[k, b] = begin + emitted, origin + emitted
        _request_below(state, state.draft_lengths.tolist(), k, b)


def commit_unverified(state, op, logits, token_ids, lse, thresholds, taken):
    k = op.level
    rows, below = state.rows[k], state.rows[k - 1]
    assert rows is not None
    logits = filtered(logits, state.temperature[k], thresholds)
    for b in range(state.batch):
        origin, n = int(state.origin[b]), int(taken[b])
        if origin < 0:
            continue
        begin = int(state.start[k, b]) + origin
        state.window[b, begin + n] = token_ids[b]
        state.lse[k][b, origin : origin + n] = 0 if below is None else state.lse[k - 1][b, :n]
        state.lse[k][b, origin + n] = lse[b]
        if state.temperature[k, b] > 0:
            if below is None:
                _write_point_masses(rows[b, origin : origin + n], state.window[b, begin:][:n])
            else:
                rows[b, origin : origin + n] = below[b, :n]
            rows[b, origin + n] = logits[b]
        state.counts[k, INVALID.value] += int(not lse[b].isfinite())
        state.end[b], state.drafted[k, b] = begin + n + 1, origin + n + 1
        _request_below(state, state.draft_lengths.tolist(), k, b)


def lookup_ngram(state, text, *, shortest, longest):
    for b in range(state.batch):
        requested, base, end = int(state.requested[0, b]), int(state.base[b]), int(state.end[b])
        tokens = []
        if requested:
            tokens = text[state.slot[b], :base].tolist() + state.window[b, :end].tolist()
        found = propose(np.array(tokens), shortest, longest, requested)
        _write(state, b, found.tolist())


def lookup_bigram(state, successor):
    for b in range(state.batch):
        found: list[int] = []
        token = int(state.window[b, int(state.end[b]) - 1])
        while len(found) < state.requested[0, b] and (token := int(successor[token])) >= 0:
            found.append(token)
        _write(state, b, found)


def begin_tail(state, schedule):
    for b in range(state.batch):
        drafted = int(state.drafted[-1, b])
        room = schedule.horizontal_tokens if drafted else 0
        state.start[0, b], state.drafted[0, b], state.requested[0, b] = state.end[b], 0, room
        state.requested[-1, b] = drafted + room
        state.origin[b] = drafted if drafted else -1


def append_tail(state, schedule):
    level = schedule.num_levels - 1
    rows, below = state.rows[level], state.rows[0]
    assert rows is not None
    for b in range(state.batch):
        origin, n = int(state.origin[b]), int(state.drafted[0, b])
        if origin >= 0:
            own = slice(origin, origin + n)
            state.lse[level][b, own] = 0 if below is None else state.lse[0][b, :n]
            if state.temperature[level, b] > 0 and below is not None:
                rows[b, own] = below[b, :n]
            elif state.temperature[level, b] > 0:
                _write_point_masses(rows[b, own], state.window[b, int(state.end[b]) - n :][:n])
            state.drafted[level, b] = origin + n


def _write_point_masses(rows, token_ids):
    rows.fill_(-float("inf")).scatter_(1, token_ids.long()[:, None], 0.0)


def end_unsure_drafts(thresholds, state, op, logits, result=None):
    k, measured = op.level, thresholds.stopping[op.level]
    width = len(logits) // state.batch
    for b in range(state.batch):
        slot, count = int(state.slot[b]), 1
        if isinstance(op, Draft):
            origin = op.step if op.step < state.requested[k, b] else -1
        else:
            origin = int(state.origin[b])
        if origin < 0:
            continue
        entropy, drafter = thresholds.entropy[k][b], thresholds.drafter[k][b]
        if result is not None:
            count, accepted = int(result.num_emitted[b]), int(result.num_accepted[b])
            if accepted < state.drafted[k - 1, b]:
                _observe(thresholds, slot, k - 1, b, accepted)
        elif isinstance(op, Verify):
            taken = int(state.drafted[k - 1, b])
            entropy[origin : origin + taken] = thresholds.entropy[k - 1][b, :taken]
            drafter[origin : origin + taken] = thresholds.drafter[k - 1][b, :taken]
            origin += taken
        rows = torch.full((count,), float("nan"))
        if measured:
            rows = torch.from_numpy(entropy_nats(logits[b * width : b * width + count].double()))
            number = int(thresholds.count[k, slot])
            if number and (rows.float() > thresholds.total[k, slot] / number).any():
                state.requested[k, b] = origin + count
        entropy[origin : origin + count], drafter[origin : origin + count] = rows, k


def observe_target(thresholds, state, *, index, num_sampled, num_rejected):
    for i, slot in enumerate(index.tolist()):
        row, accepted = int(state.row_of_slot[slot]), int(num_sampled[i]) - 1
        if row >= 0 and accepted >= 0:
            verified = min(int(state.draft_length[row]), accepted + int(num_rejected[i]))
            if accepted < verified:
                _observe(thresholds, slot, len(thresholds.stopping) - 1, row, accepted)


def _observe(thresholds, slot, level, b, place):
    entropy = thresholds.entropy[level][b, place]
    if not entropy.isnan():
        drafter = thresholds.drafter[level][b, place]
        thresholds.total[drafter, slot] += entropy
        thresholds.count[drafter, slot] += 1


def collect(state, schedule, drafter=-1):
    top = schedule.num_levels - 1
    for b in range(state.batch):
        drafted, end = int(state.drafted[top, b]), int(state.end[b])
        state.draft_length[b] = drafted
        state.counts[drafter, Count.drafted] += drafted
        state.counts[drafter, Count.rounds] += int(drafted > 0)
        for i in range(schedule.num_speculative_tokens):
            token = state.window[b, min(schedule.window + i, end - 1)]
            state.draft_tokens[b, i] = max(int(token), 0)


def _write(state, b, found):
    end = int(state.end[b])
    state.window[b, end : end + len(found)] = torch.tensor(found, dtype=torch.int32)
    state.end[b], state.drafted[0, b] = end + len(found), len(found)


def _request_below(state, lengths, level, b):
    for k in range(level - 1, -1, -1):
        room = max(int(state.requested[k + 1, b]) - int(state.drafted[k + 1, b]) - 1, 0)
        state.requested[k, b] = min(lengths[k], room)
        state.start[k, b], state.drafted[k, b] = state.end[b], 0
