"""Requests to change a function of Python's library: text that a lookup finds in the prompt.

Functions are read from the installed Python, so that no text of theirs is kept here.
"""

import inspect
import json
import pkgutil
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


def prompts() -> list[str]:
    """One for each of EDITS."""
    found = []
    for name, instruction in EDITS.items():
        source = inspect.getsource(pkgutil.resolve_name(name))
        found.append(
            f"Here is a Python function:\n\n```python\n{source}```\n\n{instruction} "
            "Answer with the whole changed function."
        )
    return found


def write(path: Path) -> None:
    """As a file of prompts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"turns": [each]}) + "\n" for each in prompts()))
