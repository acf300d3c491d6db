"""Prompts that a user gives for profiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_hsd.errors import UserError

# Raw text, or a chat of one message.
Prompt = str | list[dict[str, str]]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file, in order: raw text (str), or a chat of one user message.

    A file named `*.jsonl` holds one JSON object per line: `prompt` is raw text; of `turns` the
    first is taken as a chat message, since later turns depend on answers. Any other file is
    plain text with prompts separated by blank lines.

    Raises:
        UserError: no such file, a line that is not such an object, or no prompt at all.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no prompts file '{path}'.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read ({error}).") from None
    if path.suffix == ".jsonl":
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        prompts = [_from_json(f"line {n} of the prompts file '{path}'", line) for n, line in lines]
    else:
        prompts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if not prompts:
        raise UserError(f"the prompts file '{path}' holds no prompt.")
    return prompts


def _from_json(where: str, line: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error}).") from None
    if isinstance(entry, dict):
        prompt, turns = entry.get("prompt"), entry.get("turns")
        if isinstance(prompt, str) and prompt.strip():
            return prompt
        if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
            return [{"role": "user", "content": turns[0]}]
    raise UserError(f"{where} has neither a 'prompt' (text) nor 'turns' (a list of texts).")


def encode(tokenizer: Any, prompt: Prompt, longest: int) -> list[int]:
    """The last `longest` token ids of a prompt; raises UserError if it has none.

    A chat goes through the tokenizer's chat template where it has one, else it is plain text.
    """
    if isinstance(prompt, list) and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt if isinstance(prompt, str) else prompt[0]["content"])
    if not ids:
        raise UserError(f"the prompt {prompt!r} is empty for this tokenizer: remove it.")
    return ids[-longest:]
