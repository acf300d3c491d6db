"""Patches for an engine's process: they write every greedy draft to a file."""

import json
import os
from pathlib import Path

import numpy as np
from support import adversarial_depth

FILE = "HSD_TEST_DRAFTS"


def install() -> None:
    """Append [text, draft] to the file named by the environment, a line for each draft."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_draft_token_ids

    def update_draft_token_ids(self, drafts):
        with open(os.environ[FILE], "a") as file:
            for request_id, draft in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                request = self.requests.get(request_id)
                if request is not None and draft and not request.sampling_params.temperature:
                    text = list(request.all_token_ids)
                    file.write(json.dumps([text, list(map(int, draft))]) + "\n")
        original(self, drafts)

    Scheduler.update_draft_token_ids = update_draft_token_ids


def install_with_a_head() -> None:
    """Append [text, [draft, source of each token, unread]] for drafts that come and go.

    `unread` are the positions before the last token that a head, if it has read any, has not.
    """
    adversarial_depth.install()
    _note_what_is_read()
    from vllm_hsd.runner_v1.eagle3 import Eagle3Level
    from vllm_hsd.runner_v1.proposer import CascadeProposer

    original = CascadeProposer.propose_draft_token_ids

    def propose_draft_token_ids(self, *args):
        drafts = original(self, *args)
        batch = self.runner.input_batch
        with open(os.environ[FILE], "a") as file:
            for row, draft in enumerate(drafts):
                text = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]].tolist()
                slot = self.table.slot_of[batch.req_ids[row]]
                source = self.cascade.drafts[-1].source[slot, : len(draft)].tolist()
                params = self.runner.requests[batch.req_ids[row]].sampling_params
                if draft and not params.temperature:
                    [head] = (m for m in self.model_levels if isinstance(m, Eagle3Level))
                    slots = _slots(head, [row] * (len(text) - 1), range(len(text) - 1))
                    unread = [i for i, place in enumerate(slots) if place not in head.was_read]
                    file.write(json.dumps([text, [draft, source, unread]]) + "\n")
        return drafts

    CascadeProposer.propose_draft_token_ids = propose_draft_token_ids


def _note_what_is_read() -> None:
    """Give heads a set `was_read` of slots of their caches."""
    from vllm_hsd.runner_v1.eagle3 import Eagle3Level

    clear, forward = Eagle3Level.clear, Eagle3Level._forward_once
    Eagle3Level.was_read = set()

    def noted_clear(self, rows, starts, ends):
        for row, start, end in zip(rows, starts, ends, strict=True):
            self.was_read.difference_update(_slots(self, [row] * (end - start), range(start, end)))
        clear(self, rows, starts, ends)

    def noted_forward(self, tokens, rows, starts, counts, num_logits):
        for row, start, count in zip(rows, starts, counts, strict=True):
            end = min(start + count, self.verified[row])
            self.was_read.update(_slots(self, [row] * (end - start), range(start, end)))
        return forward(self, tokens, rows, starts, counts, num_logits)

    Eagle3Level.clear, Eagle3Level._forward_once = noted_clear, noted_forward


def _slots(head, rows, positions) -> list[int]:
    where = np.array([rows, positions], dtype=np.int64).reshape(2, -1)
    return head.slots(head.attention_groups[0].kv_cache_group_id, *where).tolist()


def read(path: Path) -> dict[tuple[int, ...], list]:
    """Text -> the last draft made after it."""
    lines = path.read_text().splitlines()
    return {tuple(text): draft for text, draft in map(json.loads, lines)}
