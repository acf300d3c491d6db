"""The user's mistakes: one exception, and short quotes of what was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


class UserError(ValueError):
    """Mistakes of the user's; each argument is one sentence that names the key or file and says
    what to do.
    """

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


@contextlib.contextmanager
def collected(mistakes: list[str]) -> Iterator[None]:
    """Put the sentences of a `UserError` into a list, so that further checks run."""
    try:
        yield
    except UserError as error:
        mistakes.extend(error.args)


def quoted(value: object, limit: int = 100) -> str:
    """`repr` of a value from outside, cut in the middle to at most `limit` characters."""
    if isinstance(value, str) and len(value) > 2 * limit:
        value = value[:limit] + value[-limit:]  # repr of the whole could take memory for nothing
    elif isinstance(value, int) and not -(10**limit) < value < 10**limit:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print long ones
    elif isinstance(value, dict | list | tuple | bytes) and len(value) > limit:
        return f"a {type(value).__name__} of {len(value)} entries"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a long integer inside, or a deep nest
        return f"a {type(value).__name__}"
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def brief(reason: object, limit: int = 150) -> str:
    """Another program's message on one line, cut to at most `limit` characters."""
    text = " ".join(str(reason).split()).rstrip(".")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def refusal(error: Any) -> str:
    """One sentence for the first fault that vLLM finds in its own keys (a `ValidationError`)."""
    fault = error.errors()[0]
    key = ".".join(map(str, fault["loc"])) or "speculative_config"
    return f"vLLM refuses {brief(key, 80)}: {brief(fault['msg'])}."
