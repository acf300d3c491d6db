"""The user's mistakes: one exception, and short quotes of what was given."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user's; the message is one sentence that names the key or file and says
    what to do.
    """


def quoted(value: object, limit: int = 80) -> str:
    """`repr` of a value from outside, cut to at most `limit` characters."""
    if isinstance(value, str | bytes):
        text = repr(value[: limit + 1])  # repr of the whole could take memory for nothing
    elif isinstance(value, int) and not -(10**limit) < value < 10**limit:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print long ones
    elif isinstance(value, dict | list | tuple) and len(value) > limit:
        return f"a {type(value).__name__} of {len(value)} entries"
    else:
        try:
            text = repr(value)
        except (ValueError, RecursionError):  # a long integer inside, or a list within itself
            return f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def brief(reason: object, limit: int = 200) -> str:
    """Another program's message on one line, cut to at most `limit` characters."""
    text = " ".join(str(reason).split()).rstrip(".")
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
