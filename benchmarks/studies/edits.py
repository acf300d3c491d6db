"""Requests to change a function or a file of Python's library: a lookup finds text in the prompt.

They are read from the installed Python, so that no text of theirs is kept here.
"""

import inspect
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path

EDITS = {
    "textwrap:dedent": "Rename the parameter `text` to `source` everywhere.",
    "textwrap:indent": "Add type hints to all parameters and to the result.",
    "textwrap:shorten": "Add a check that `width` is positive, which raises ValueError.",
    "shlex:quote": "Let it accept bytes, too: decode them as UTF-8 first.",
    "shlex:join": "Add a parameter `separator=' '` and use it.",
    "email.utils:formataddr": "Return None where the address is empty.",
    "statistics:median_grouped": "Rename `interval` to `width` everywhere.",
    "statistics:median": "Round the result to `digits` places if that new parameter is given.",
    "statistics:median_low": "Write the docstring's example for three other numbers.",
    "statistics:pvariance": "Add a keyword argument `default` that is returned for no data.",
    "colorsys:rgb_to_hsv": "Add a docstring that says what it takes and returns.",
    "colorsys:hls_to_rgb": "Check that all three arguments are in [0, 1]; raise ValueError.",
    "colorsys:yiq_to_rgb": "Replace the repeated comparisons by a helper function `clip`.",
    "string:capwords": "Leave words alone that are in upper case already.",
    "fnmatch:filter": "Add a parameter `invert=False` that keeps the names that do not match.",
    "urllib.parse:urljoin": "Add comments that explain every step.",
    "urllib.parse:parse_qsl": "Rename `qs` to `query` everywhere.",
    "difflib:get_close_matches": "Return pairs of score and match, best first.",
    "calendar:monthrange": "Return a named tuple `MonthRange` with fields `weekday` and `days`.",
    "heapq:merge": "Rename the parameter `iterables` to `inputs` everywhere.",
}

FILES = {
    "asyncio.coroutines": "Rename `_iscoroutine_typecache` to `_known_types` everywhere.",
    "asyncio.exceptions": "Give every exception a docstring of two sentences.",
    "asyncio.format_helpers": "Add type hints to all functions.",
    "asyncio.trsock": "Rename the attribute `_sock` to `_socket` everywhere.",
    "bisect": "Raise ValueError where `hi` is less than `lo`, in all functions.",
    "colorsys": "Add type hints to all functions.",
    "ctypes._endian": "Rename `_other_endian` to `_swapped` everywhere.",
    "email.base64mime": "Rename the parameter `header_bytes` to `data` everywhere.",
    "email.encoders": "Rename `_qencode` to `_quote` everywhere.",
    "email.iterators": "Add type hints to all functions.",
    "json.scanner": "Rename `py_make_scanner` to `make_python_scanner` everywhere.",
    "json.tool": "Add an option `--quiet` that prints nothing but errors.",
    "keyword": "Add a function `isany` that is true for keywords and for soft keywords.",
    "multiprocessing.popen_fork": "Rename the method `_launch` to `launch` everywhere.",
    "secrets": "Raise ValueError in all functions for a negative `nbytes`.",
    "sqlite3.dump": "Replace every `format` call by an f-string.",
    "urllib.error": "Add a method `__repr__` to every class.",
    "urllib.response": "Add a docstring to every method that has none.",
    "xml.dom.domreg": "Rename `well_known_implementations` to `known` everywhere.",
    "xml.dom.minicompat": "Rename `NodeList` to `Nodes` everywhere.",
}


def prompts(edits: Mapping[str, str] = EDITS, what: str = "function") -> list[str]:
    """One for each edit of a function or of a file."""
    found = []
    for name, instruction in edits.items():
        source = inspect.getsource(pkgutil.resolve_name(name))
        found.append(
            f"Here is a Python {what}:\n\n```python\n{source}```\n\n{instruction} "
            f"Answer with the whole changed {what}."
        )
    return found


def write(directory: Path) -> None:
    """As files of prompts, edits of functions and edits of files."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, found in {"edits": prompts(), "edits of files": prompts(FILES, "file")}.items():
        lines = [json.dumps({"turns": [each]}) + "\n" for each in found]
        Path(directory, f"{name}.jsonl").write_text("".join(lines))
