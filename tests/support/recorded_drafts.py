"""Patch for an engine's process: writes every draft that the scheduler receives to a file."""

import json
import os
from pathlib import Path

FILE = "HSD_TEST_DRAFTS"


def install() -> None:
    """Append [text, draft] to the file named by the environment, a line for each draft."""
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_draft_token_ids

    def update_draft_token_ids(self, drafts):
        with open(os.environ[FILE], "a") as file:
            for request_id, draft in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                request = self.requests.get(request_id)
                if request is not None and draft:
                    text = list(request.all_token_ids)
                    file.write(json.dumps([text, list(map(int, draft))]) + "\n")
        original(self, drafts)

    Scheduler.update_draft_token_ids = update_draft_token_ids


def read(path: Path) -> dict[tuple[int, ...], list[int]]:
    """Text -> the last draft made after it."""
    lines = path.read_text().splitlines()
    return {tuple(text): draft for text, draft in map(json.loads, lines)}
