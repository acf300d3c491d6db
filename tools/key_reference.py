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
[recipes](recipes.md). Dashes in keys are read as underscores.

## `"method": "hsd"`

`cascade`, the path of a file that `vllm-hsd plan` wrote, may stand in place of `levels`.
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


def table(model: type[Keys], prefix: str = "") -> list[str]:
    """Lines of a table with a row for each key of a class, those that a kind needs first."""
    texts, schemas = described(model), model.model_json_schema()["properties"]
    rows, vllms = [], []
    fields = model.model_fields.items()
    for name, field in sorted(fields, key=lambda item: not item[1].is_required()):
        nested = getattr(model, "value_keys", None) if name == getattr(model, "kind", "") else None
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        if nested:
            rows.append(f"| `{name}` | mapping | required | `{nested.example}`, for example |")
            rows += table(nested, f"{name}.")[2:]
        elif field.exclude:
            vllms.append(f"`{name}`")
        else:
            kind = type_name(schemas[name])
            rows.append(f"| `{prefix}{name}` | {kind} | {default} | {texts[name]} |")
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]
    if vllms:
        lines += ["", f"And vLLM's own keys for a draft model: {', '.join(vllms)}."]
    return lines


def page() -> str:
    """The text of docs/keys.md."""
    lines = [HEAD, *table(CascadeConfig)]
    for kind, model in KINDS.items():
        summary = (inspect.getdoc(model) or "").split("\n")[0]
        lines += ["", f"## `{kind}` levels", "", summary, "", *table(model)]
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
