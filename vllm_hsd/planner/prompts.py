"""Prompts that a user gives for profiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_hsd.errors import UserError

# Raw text, or a chat of one message.
Prompt = str | list[dict[str, str]]


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read ({error}).") from None


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file, in order.

    A file named `*.jsonl` holds one JSON object per line: `prompt` is raw text; of `turns` the
    first is taken as a chat message, since later turns depend on answers. Any other file is
    plain text with prompts separated by blank lines.

    Returns:
        raw text (str) or a chat of one user message per prompt.

    Raises:
        UserError: no such file, a line that is not such an object, or no prompt at all.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no prompts file '{path}'.")
    text = read_text(path)
    if path.suffix == ".jsonl":
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        prompts = [_from_json(path, number, line) for number, line in lines]
    else:
        prompts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if not prompts:
        raise UserError(f"the prompts file '{path}' holds no prompt.")
    return prompts


def _from_json(path: Path, number: int, line: str) -> str | list[dict[str, str]]:
    where = f"line {number} of the prompts file '{path}'"
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
    """Token ids of a prompt, its last `longest` ones.

    A chat goes through the tokenizer's chat template where it has one, and is plain text
    otherwise.

    Raises:
        UserError: the prompt has no tokens.
    """
    if isinstance(prompt, list) and tokenizer.chat_template:
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt if isinstance(prompt, str) else prompt[0]["content"])
    if not ids:
        raise UserError(f"the prompt {prompt!r} is empty for this tokenizer: remove it.")
    return ids[-longest:]
