"""The steps of head_steps.py in plain Python; tables: what groups.table_ptrs points at."""

import torch


def next_tokens(input_ids, index, query_start_loc, positions, text, length, longest):
    """Where there is a next token."""
    for b, slot in enumerate(index.tolist()):
        for t in range(int(query_start_loc[b]), int(query_start_loc[b + 1])):
            if int(positions[t]) + 1 < int(length[slot]):
                input_ids[t] = text[slot, positions[t] + 1]


def read_step(
    inputs, groups, max_model_len, *, index, query_start_loc, positions, text, length, tables
):
    """Rows of a request that hold nothing are -1 in all tensors."""
    reading, q = inputs.reading, inputs.reading.query_length
    for tensor in (reading.input_ids, reading.slot_mapping, inputs.source):
        tensor.fill_(-1)
    reading.seq_lens.zero_()
    for b in range(reading.batch):
        count = min(b + 1, len(index))
        reading.query_start_loc[b + 1] = count * q
    for b, slot in enumerate(index.tolist()):
        steps = range(int(query_start_loc[b]), int(query_start_loc[b + 1]))
        place = {int(positions[t]): t for t in steps}
        # The token after the step's last one is known, of a prompt too; drafts may be rejected.
        known = [e for e in place if e + 1 < int(length[slot])]
        last = max(known)
        lowest = max(min(max(last - q + 1, min(place)), max_model_len - q), 0)
        reading.seq_lens[b] = lowest + q
        inputs.last[b] = b * q + last - lowest
        for i in range(q):
            entry, at = lowest + i, b * q + i
            reading.positions[at] = entry
            if entry > last:
                continue
            reading.input_ids[at] = text[slot, entry + 1]
            if entry not in place:
                continue  # near max_model_len, computed in an earlier step
            inputs.source[at] = place[entry]
            _write(reading.slot_mapping, at, slot, entry, groups, tables)


def place_entry(inputs, state, schedule, back, groups, max_model_len, *, tables):
    one, top, states = inputs.drafting, schedule.num_levels - 1, inputs.own.shape[1]
    num_reqs = int(state.num_reqs)
    one.slot_mapping.fill_(-1)
    for b in range(state.batch):
        index = int(state.end[b]) - 1 - back
        entry = int(state.base[b]) + index - 1
        fed = min(max(entry, 0), max_model_len - 1)
        one.input_ids[b] = max(int(state.window[b, max(index, 0)]), 0)
        one.positions[b], one.seq_lens[b] = fed, fed + 1 if b < num_reqs else 0
        one.query_start_loc[b + 1] = min(b + 1, num_reqs)
        number = index - (schedule.window - 1)
        inputs.reads[b] = b * states + max(number, 0)
        inputs.writes[b] = b * states + (number + 1 if number >= 0 else states - 1)
        running = state.drafted[top, b] < state.requested[top, b] and state.slot[b] >= 0
        if running and number > 0 and entry <= int(state.limit[b]):
            _write(one.slot_mapping, b, int(state.slot[b]), entry, groups, tables)


def _write(slot_mapping: torch.Tensor, at: int, slot: int, position: int, groups, tables) -> None:
    for g, table in enumerate(tables):
        size = int(groups.block_sizes[g])
        block, offset = divmod(position, size)
        slot_mapping[g, at] = int(table[slot, block]) * size + offset
