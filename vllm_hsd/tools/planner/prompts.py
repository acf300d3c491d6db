"""Prompts that a user gives for profiling."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.tools.planner.public_sets import PublicSet

# Raw text, or a chat of one message.
Prompt = str | list[dict[str, str]]
# Arguments of `vllm.SamplingParams` that a line may hold.
SAMPLING = ("extra_args", "structured_outputs")


def prompts_file(path: str | Path) -> Path:
    """The file, or that of a public set, which is fetched when it is first named.

    Raises:
        UserError: there is no such file, or the set cannot be fetched.
    """
    return Path(path) if Path(path).is_file() else PublicSet.of(str(path)).file()


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file, in order, where lines hold nothing else; see `read_requests`."""
    requests = read_requests(path)
    refuse_sampling(sampling for _, sampling in requests)
    return [prompt for prompt, _ in requests]


def refuse_sampling(lines: Iterable[dict[str, Any]]) -> None:
    """Raise a UserError if any line holds arguments of SAMPLING."""
    if held := next(filter(None, lines), None):
        raise UserError(
            f"--prompts: only `vllm-hsd bench` reads {quoted(next(iter(held)))} of a line: remove "
            "it."
        )


def read_requests(path: str | Path) -> list[tuple[Prompt, dict[str, Any]]]:
    """Prompts of a file, in order: raw text (str), or a chat of one user message.

    A public set is fetched; prompts whose text its source keeps are left out, which is said. A
    file named `*.jsonl` holds one JSON object per line: `prompt` is raw text; of `turns` and of
    `messages` the user's first is taken as a chat message, since later turns depend on answers.
    Any other file is plain text with prompts separated by blank lines.

    Returns:
        each prompt with the arguments of SAMPLING that its line holds.

    Raises:
        UserError: no such file or set, a line that is not such an object, or no prompt at all.
    """
    public = None if Path(path).is_file() else PublicSet.of(str(path))
    file = public.file() if public else Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{file}' cannot be read ({error}).") from None
    if file.suffix == ".jsonl":
        entries = [
            _parsed(f"line {n} of the prompts file '{file}'", line)
            for n, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
        requests = [_request(*each) for each in (public.chosen(entries) if public else entries)]
    else:
        requests = [(part.strip(), {}) for part in text.split("\n\n") if part.strip()]
    if not requests:
        raise UserError(f"the prompts file '{file}' holds no prompt.")
    return requests


def _parsed(where: str, line: str) -> tuple[str, Any]:
    try:
        entry = json.loads(line)
        # Half a pair of surrogates is no text.
        json.dumps(entry, ensure_ascii=False).encode()
        return where, entry
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({brief(error)}).") from None


def _request(where: str, entry: Any) -> tuple[Prompt, dict[str, Any]]:
    if isinstance(entry, dict):
        prompt, turns = entry.get("prompt"), entry.get("turns")
        sampling = {key: entry[key] for key in SAMPLING if key in entry}
        if wrong := [key for key, value in sampling.items() if not isinstance(value, dict)]:
            raise UserError(f"{where}: '{wrong[0]}' is no JSON object.")
        if isinstance(prompt, str) and prompt.strip():
            return prompt, sampling
        if turns is None and isinstance(entry.get("messages"), list):
            said = (each for each in entry["messages"] if isinstance(each, dict))
            turns = [each.get("content") for each in said if each.get("role", "user") == "user"]
        if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
            return [{"role": "user", "content": turns[0]}], sampling
    raise UserError(
        f"{where} has neither a 'prompt' (text) nor 'turns' (a list of texts) nor 'messages'."
    )


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; raises UserError if it has none, or the chat template refuses it.

    A chat goes through the tokenizer's chat template where it has one, else it is plain text.
    """
    if isinstance(prompt, list) and not hasattr(tokenizer, "chat_template"):
        # vLLM's of Mistral's own format, whose chats are no text.
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)
    elif isinstance(prompt, list) and tokenizer.chat_template:
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # Its code is the model's.
            fault = f"the chat template of the model refuses the prompt {prompt!r} ({brief(error)})"
            raise UserError(f"{fault}: remove it.") from None
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt if isinstance(prompt, str) else prompt[0]["content"])
    if not ids:
        raise UserError(f"the prompt {prompt!r} is empty for this tokenizer: remove it.")
    return list(ids)


def fit(prompts: list[list[int]], longest: int) -> tuple[list[list[int]], str]:
    """The last `longest` token ids of each, and a sentence if some are cut, or nothing."""
    cut = sum(len(ids) > longest for ids in prompts)
    told = (
        f"{cut} of {len(prompts)} prompts lose their beginning: the context has room for "
        f"{longest} tokens of a prompt."
    )
    return [ids[-longest:] for ids in prompts], told if cut else ""
