"""Patches for an engine's process: they write every greedy draft to a file."""

import json
import os
from pathlib import Path

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


def install_in_turns() -> None:
    """As `install`, with drafts that come and go."""
    adversarial_depth.install()
    install()


def install_with_sources() -> None:
    """Append [text, [draft, source of each token]] for every draft of sources that take turns."""
    adversarial_depth.install()
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
                    file.write(json.dumps([text, [draft, source]]) + "\n")
        return drafts

    CascadeProposer.propose_draft_token_ids = propose_draft_token_ids


def read(path: Path) -> dict[tuple[int, ...], list]:
    """Text -> the last draft made after it."""
    lines = path.read_text().splitlines()
    return {tuple(text): draft for text, draft in map(json.loads, lines)}
