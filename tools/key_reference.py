"""Writes docs/keys.md and docs/known-faults.md: `python -m tools.key_reference`."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from vllm_hsd.config.cascade_config import CascadeConfig
from vllm_hsd.levels import KINDS, Keys
from vllm_hsd.tools.known_faults import KNOWN_FAULTS

PAGE = Path(__file__).parents[1] / "docs" / "keys.md"
FAULTS = PAGE.with_name("known-faults.md")
FAULTS_HEAD = """\
# Known faults of stock vLLM

Combinations of stock vLLM (0.32, 0.33) that are wrong or slow today. `vllm-hsd doctor` and
`vllm-hsd advise` name those that a configuration can meet. Generated from
`vllm_hsd/tools/known_faults.py` (`python -m tools.key_reference`).

| with | one sees | way out | vLLM issue | known from |
| --- | --- | --- | --- | --- |
"""
HEAD = """\
# All keys

Generated from the classes that check a configuration (`python -m tools.key_reference`). What the
keys do together is in [configuration](configuration.md), whole configurations are in
[recipes](recipes.md). Dashes in keys of cascades and
levels are read as underscores.

## `"method": "hsd"`

`cascade`, the path of a file that `vllm-hsd plan` wrote, may stand in place of `levels`; other keys
given next to it win over the file's.
"""


def described(model: type[Keys]) -> dict[str, str]:
    """Key -> its description in the docstrings of a class and of those that it inherits from."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        _, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.M):
            found[name] = re.sub(r"\bNone\b", "`null`", " ".join(text.split()))
    return found


def type_name(schema: dict[str, Any]) -> str:
    """A JSON schema of a key's value in words, with its limits."""
    if "anyOf" in schema:
        return " or ".join(map(type_name, schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of {schema['minItems']} to {schema['maxItems']}"
    low, high = schema.get("minimum"), schema.get("maximum")
    limits = "" if low is None else f", at least {low}" if high is None else f", {low} to {high}"
    return schema["type"] + limits


HEADER = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]


def rows(model: type[Keys], prefix: str = "") -> list[str]:
    """A row of a table for each key of a class but vLLM's own, those that a kind needs first."""
    texts, schemas = described(model), model.model_json_schema()["properties"]
    found = []
    fields = model.model_fields.items()
    for name, field in sorted(fields, key=lambda item: not item[1].is_required()):
        nested = getattr(model, "value_keys", None) if name == getattr(model, "kind", "") else None
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        if nested:
            found.append(f"| `{name}` | mapping | required | `{nested.example}`, for example |")
            found += rows(nested, f"{name}.")
        elif not field.exclude:
            kind = type_name(schemas[name])
            found.append(f"| `{prefix}{name}` | {kind} | {default} | {texts[name]} |")
    return found


def vllms(model: type[Keys]) -> str:
    """vLLM's own keys for a draft model that a class takes."""
    return ", ".join(f"`{name}`" for name, field in model.model_fields.items() if field.exclude)


def page() -> str:
    """The text of docs/keys.md: keys of several kinds once, then what each kind has of its own."""
    lines = [HEAD, *HEADER, *rows(CascadeConfig)]
    rows_of = {kind: rows(model) for kind, model in KINDS.items()}
    kinds: dict[str, list[str]] = {}
    for kind, own in rows_of.items():
        for row in own:
            kinds.setdefault(row, []).append(f"`{kind}`")
    shared = {row: names for row, names in kinds.items() if len(names) > 1}
    lines += ["", "## Keys of several kinds of levels", ""]
    lines += [f"{line} {last} |" for line, last in zip(HEADER, ("of", "---"), strict=True)]
    for row, names in shared.items():
        lines.append(f"{row} {'every kind' if len(names) == len(KINDS) else ', '.join(names)} |")
    takers: dict[str, list[str]] = {}
    for kind, model in KINDS.items():
        if found := vllms(model):
            takers.setdefault(found, []).append(f"`{kind}`")
    for found, names in takers.items():
        lines += ["", f"vLLM's own keys for a draft model, of {', '.join(names)}: {found}."]
    for kind, model in KINDS.items():
        summary = (inspect.getdoc(model) or "").split("\n")[0]
        own = [row for row in rows_of[kind] if row not in shared]
        lines += ["", f"## `{kind}` levels", "", summary, "", *HEADER, *own]
    return "\n".join(lines) + "\n"


def faults_page() -> str:
    """The text of docs/known-faults.md."""
    rows = (
        (fault.condition, fault.symptom, fault.way_out, fault.issue, fault.seen)
        for fault in KNOWN_FAULTS
    )
    return FAULTS_HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page())
    FAULTS.write_text(faults_page())
