"""Files of users: checked before memory is taken for them, and written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from safetensors import SafetensorError, safe_open

from vllm_hsd.errors import UserError, brief, quoted

T = TypeVar("T")

MAX_JSON_BYTES = 64 << 20


def read_json(path: str | Path, key: str, writer: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Parse a JSON file of at most `max_bytes`.

    Args:
        key: what the user calls it; every message begins with it.
        writer: the command that writes such files, for the message.

    Raises:
        UserError: no such file, too long, not UTF-8, not JSON (NaN and repeated keys are not), or
            nested too deeply.
    """
    path, named = Path(path), f"{key}: {quoted(str(path))}"
    if not os.path.isfile(path):
        raise UserError(f"{key}: no file {quoted(str(path))}; `{writer}` writes one.")
    try:
        if (size := path.stat().st_size) > max_bytes:
            fault = f"has {size} bytes, above the limit of {max_bytes}"
        else:
            text = path.read_bytes().decode("utf-8")
            return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{key}: cannot read {quoted(str(path))} ({reason}).") from None
    except UnicodeDecodeError:
        fault = "is not text in UTF-8"
    except (ValueError, RecursionError) as error:  # ValueError: also integers of 4300 digits
        deep = isinstance(error, RecursionError)
        fault = f"is not JSON ({'nested too deeply' if deep else brief(error)})"
    raise UserError(f"{named} {fault}: give a file that `{writer}` wrote.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {quoted(repeated)} is given twice")
    return mapping


def check_safetensors(path: str | Path) -> None:
    """Check by its header that a .safetensors file is whole: UserError, which begins with the file,
    if it is cut off, damaged or not such a file.
    """
    try:
        with safe_open(path, framework="np"):
            return
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{quoted(str(path))} is not a complete safetensors file ({brief(error, 80)}): copy "
            "it again."
        ) from error


@dataclass(frozen=True)
class TensorHeader:
    """What a .safetensors file declares: its metadata, and types ("F32") and shapes by tensor."""

    facts: dict[str, str]
    types: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    def number(self, fact: str, low: int, high: int) -> int:
        """A whole number of the metadata; ValueError if it is not there or not in [low, high]."""
        digits = self.facts.get(fact, "")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 10):
            raise ValueError(f"its {fact} is not a number")
        if not low <= int(digits) <= high:
            raise ValueError(f"its {fact} is not between {low} and {high}")
        return int(digits)


def read_tensors(
    path: str | Path,
    names: Collection[str],
    check: Callable[[TensorHeader], T],
    blame: Callable[[str], str],
    framework: Literal["np", "pt"] = "np",
    with_values: bool = True,
) -> tuple[T, dict[str, Any]]:
    """Read the tensors of a .safetensors file, whose header is checked before memory is taken.

    Args:
        names: the tensors that it must hold, and no others.
        check: raises ValueError for a header that is not as it must be; returns what it says.
        blame: from a reason to the sentence that tells the user.
        framework: "np" for numpy arrays, "pt" for torch tensors.
        with_values: False for the header alone.

    Returns:
        what `check` returned, and the tensors by name.

    Raises:
        UserError: `blame` of whatever is wrong with the file.
    """
    try:
        with safe_open(path, framework=framework) as stored:
            if set(stored.keys()) != set(names):
                raise ValueError("it holds other tensors")
            slices = {name: stored.get_slice(name) for name in names}
            header = TensorHeader(
                stored.metadata() or {},
                {name: each.get_dtype() for name, each in slices.items()},
                {name: tuple(each.get_shape()) for name, each in slices.items()},
            )
            found = check(header)
            return found, {name: stored.get_tensor(name) for name in names if with_values}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(blame(brief(error))) from error


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Where to write a file that takes the place of `path` once it is complete.

    Raises:
        UserError: it cannot be written; what was at `path` is still there.
    """
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.part")
    try:
        yield unfinished
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or brief(error)
        raise UserError(
            f"cannot write {quoted(str(path))} ({reason}): make room or give another --output."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Write a JSON file, whole or not at all; raises UserError where it cannot be written."""
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
