"""Texts for a suffix store: records of what was served, and chats that the target writes itself."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm_hsd.errors import UserError, brief, quoted

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

RECORDS = (".jsonl", ".jsonl.gz")
# Longest line of a record, in characters.
MAX_RECORD = 64 << 20
QUESTION_TOKENS, ANSWER_TOKENS = 128, 256
# One after another: what a store is to find was served at different temperatures.
ANSWER_TEMPERATURES = (0.0, 0.7, 1.0)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Names the file in whatever reading it raises."""
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"TEXT {quoted(path)} is not text in UTF-8.") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:  # ValueError: a NUL in the path
        if isinstance(error, UserError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"TEXT {quoted(path)} cannot be read ({brief(reason)}).") from None


def encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text, ended by the tokenizer's eos if it has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids + end


def recorded_outputs(path: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Token ids of every output in a file of JSON lines: [n] int64 each.

    A line is an object with one of: `answer_token_ids` or `token_ids` (a list of ids); `choices`
    (a response of the OpenAI API); `messages` (a chat, of which the assistant's turns count); or
    `text`. Texts are ended by the tokenizer's eos.

    Raises:
        UserError: names the file and the line.
    """
    import numpy as np

    opened = gzip.open if path.endswith(".gz") else open
    with reading(path), opened(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_RECORD), ""), 1):
            if not line.strip():
                continue
            where = f"TEXT {quoted(path)}, line {number}"
            try:
                outputs = _outputs(json.loads(line))
            except (json.JSONDecodeError, RecursionError) as error:
                raise UserError(f"{where} is not JSON ({brief(error)}).") from None
            except ValueError as error:
                raise UserError(f"{where}: {error}.") from None
            for output in outputs:
                ids = encoded(output, tokenizer) if isinstance(output, str) else output
                yield np.array(ids, dtype=np.int64)


def _outputs(record: Any) -> list[str | list[int]]:
    """What a record says was generated."""
    if not isinstance(record, dict):
        raise ValueError("must be an object")
    for key in ("answer_token_ids", "token_ids"):
        if key in record:
            ids = record[key]
            if not isinstance(ids, list) or not all(
                type(i) is int and 0 <= i < 1 << 31 for i in ids
            ):
                raise ValueError(f"'{key}' must be a list of token ids")
            return [ids]
    found: list[Any]
    if "choices" in record:
        choices = record["choices"] if isinstance(record["choices"], list) else [None]
        found = [_content(choice) for choice in choices if not _calls_a_tool(choice)]
    elif "messages" in record:
        turns = record["messages"] if isinstance(record["messages"], list) else [None]
        chat = [turn for turn in turns if isinstance(turn, dict)]
        if len(chat) < len(turns):
            raise ValueError("'messages' must be a list of turns")
        answers = (turn for turn in chat if turn.get("role") == "assistant")
        found = [turn.get("content") for turn in answers if not _calls_a_tool(turn)]
    elif "text" in record:
        found = [record["text"]]
    else:
        raise ValueError(
            "needs one of the keys answer_token_ids, token_ids, choices, messages and text"
        )
    if not all(isinstance(text, str) for text in found):
        raise ValueError("holds an output that is not text")
    return found


def _calls_a_tool(choice: Any) -> bool:
    """Whether a choice or a turn is a call of tools without a text."""
    message = choice.get("message", choice) if isinstance(choice, dict) else {}
    if not isinstance(message, dict) or message.get("content"):
        return False
    return bool(message.get("tool_calls"))


def _content(choice: Any) -> Any:
    """Text of a choice of a completion or of a chat."""
    message = choice.get("message", choice) if isinstance(choice, dict) else None
    return message.get("content", message.get("text")) if isinstance(message, dict) else None


def self_written_answers(
    target: str, tokenizer: PreTrainedTokenizerBase, count: int
) -> Iterator[np.ndarray]:
    """Answers of chats that a chat model writes itself: [n] int64 token ids each.

    Given the chat template up to the user's turn the model writes a question at temperature 1, and
    then answers it.

    Raises:
        UserError: the model has no chat template, or vLLM cannot load it.
    """
    import numpy as np
    import torch

    from vllm_hsd.tools.dtype import cpu_defaults
    from vllm_hsd.tools.engine import EngineProcess

    before, after = _around_a_question(tokenizer)
    ask = [{"temperature": 1.0, "max_tokens": QUESTION_TOKENS, "seed": i} for i in range(count)]
    answer = [
        {**each, "temperature": temperature, "max_tokens": ANSWER_TOKENS}
        for each, temperature in zip(ask, itertools.cycle(ANSWER_TEMPERATURES), strict=False)
    ]
    engine_args = {} if torch.cuda.is_available() else cpu_defaults(target, {})
    # Of the model's context what fits into the cache.
    engine_args = {"model": target, "max_model_len": -1, **engine_args}
    with EngineProcess(engine_args, "--target") as engine:
        asked = engine.generate([before] * count, ask).token_ids
        ends = [ids[-1:] == [tokenizer.eos_token_id] for ids in asked]
        questions = [ids[: len(ids) - ended] for ids, ended in zip(asked, ends, strict=True)]
        answered = engine.generate([before + each + after for each in questions], answer)
    for ids in answered.token_ids:
        yield np.array(ids, dtype=np.int64)


def _around_a_question(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before and after the user's words."""
    marker = "QUESTION-GOES-HERE"
    try:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # jinja and transformers raise many kinds
        raise UserError(f"--chats: the target has no chat template ({brief(error)}).") from error
    before, found, after = str(chat).partition(marker)
    if not found:
        raise UserError("--chats: the target's chat template drops the user's words.")
    ids = [tokenizer(part, add_special_tokens=False).input_ids for part in (before, after)]
    return ids[0], ids[1]
