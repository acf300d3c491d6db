"""Prompts that a user gives for profiling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_hsd.checked_files import written_whole
from vllm_hsd.errors import UserError, brief

# Raw text, or a chat of one message.
Prompt = str | list[dict[str, str]]
# Arguments of `vllm.SamplingParams` that a line may hold.
SAMPLING = ("extra_args", "structured_outputs")
# At most 80 questions each, those of EAGLE's evaluation.
PUBLIC_SETS = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")
PUBLIC_URL = "https://raw.githubusercontent.com/SafeAILab/EAGLE/main/eagle/data/{}/question.jsonl"


def prompts_file(path: str | Path) -> Path:
    """The file, or one of PUBLIC_SETS in the Hugging Face cache, fetched when it is first named.

    Raises:
        UserError: there is no such file, or the set cannot be fetched.
    """
    path, name = Path(path), str(path)
    if path.is_file():
        return path
    if name not in PUBLIC_SETS:
        raise UserError(f"no prompts file '{path}'; public sets are {', '.join(PUBLIC_SETS)}.")
    # Only now: they are slow to import, and few commands fetch.
    from urllib.request import urlopen

    from huggingface_hub import cached_assets_path

    kept = cached_assets_path("vllm-hsd", "prompts") / f"{name}.jsonl"
    if not kept.exists():
        try:
            with urlopen(PUBLIC_URL.format(name), timeout=30) as response:
                text = response.read()
            # Not the page of a proxy, for example.
            json.loads(text.split(b"\n")[0])
        except (OSError, ValueError) as error:
            raise UserError(
                f"the public prompts '{name}' cannot be fetched ({brief(error)}): give a file."
            ) from None
        with written_whole(kept) as unfinished:
            unfinished.write_bytes(text)
    return kept


def read_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file, in order: `read_requests` without what lines hold besides."""
    return [prompt for prompt, _ in read_requests(path)]


def read_requests(path: str | Path) -> list[tuple[Prompt, dict[str, Any]]]:
    """Prompts of a file, in order: raw text (str), or a chat of one user message.

    One of PUBLIC_SETS is fetched. A file named `*.jsonl` holds one JSON object per line: `prompt`
    is raw text; of `turns` the first is taken as a chat message, since later turns depend on
    answers. Any other file is plain text with prompts separated by blank lines.

    Returns:
        each prompt with the arguments of SAMPLING that its line holds.

    Raises:
        UserError: no such file, a line that is not such an object, or no prompt at all.
    """
    path = prompts_file(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' cannot be read ({error}).") from None
    if path.suffix == ".jsonl":
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
        requests = [_from_json(f"line {n} of the prompts file '{path}'", line) for n, line in lines]
    else:
        requests = [(part.strip(), {}) for part in text.split("\n\n") if part.strip()]
    if not requests:
        raise UserError(f"the prompts file '{path}' holds no prompt.")
    return requests


def _from_json(where: str, line: str) -> tuple[Prompt, dict[str, Any]]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error}).") from None
    if isinstance(entry, dict):
        prompt, turns = entry.get("prompt"), entry.get("turns")
        sampling = {key: entry[key] for key in SAMPLING if key in entry}
        if wrong := [key for key, value in sampling.items() if not isinstance(value, dict)]:
            raise UserError(f"{where}: '{wrong[0]}' is no JSON object.")
        if isinstance(prompt, str) and prompt.strip():
            return prompt, sampling
        if isinstance(turns, list) and turns and isinstance(turns[0], str) and turns[0].strip():
            return [{"role": "user", "content": turns[0]}], sampling
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
