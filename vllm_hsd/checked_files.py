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
    """Parse a JSON file.

    Args:
        path: the file.
        key: what the user calls it; every message begins with it.
        writer: the command that writes such files, for the message.
        max_bytes: longest file that is read.

    Raises:
        UserError: no such file, too long, not UTF-8, not JSON (NaN and repeated keys are not), or
            nested too deeply.
    """
    path = str(path)
    if not os.path.isfile(path):
        raise UserError(f"{key}: no file {quoted(path)}; `{writer}` writes one.")
    try:
        size = os.path.getsize(path)
        if size > max_bytes:
            raise UserError(
                f"{key}: {quoted(path)} has {size} bytes, above the limit of {max_bytes}: give a "
                f"file that `{writer}` wrote."
            )
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"{key}: cannot read {quoted(path)} ({reason}).") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{key}: {quoted(path)} is not text in UTF-8: give a file that `{writer}` wrote."
        ) from None
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # ValueError: also integers of 4300 digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else brief(error)
        raise UserError(
            f"{key}: {quoted(path)} is not JSON ({reason}): give a file that `{writer}` wrote."
        ) from None


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
    """Check that a .safetensors file has a valid header and exactly the bytes that it declares.

    Only the header is read.

    Raises:
        UserError: cut off, damaged or not such a file; the message begins with the file.
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
    """What a .safetensors file declares.

    Attributes:
        facts: its metadata.
        types: of every tensor, "F32".
        shapes: of every tensor.
    """

    facts: dict[str, str]
    types: dict[str, str]
    shapes: dict[str, tuple[int, ...]]

    def number(self, fact: str, low: int, high: int) -> int:
        """A whole number of the metadata.

        Raises:
            ValueError: it is not there, or not within [low, high].
        """
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
        path: the file, which is there.
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
