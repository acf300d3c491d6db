"""`vllm-hsd advise`: the `vllm serve` line to start with on this machine, and what to measure."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import dataclass
from typing import Any

from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.tools import system
from vllm_hsd.tools.cli.doctor import configuration_findings
from vllm_hsd.tools.dtype import EXACT, choose_dtype
from vllm_hsd.tools.known_faults import Combination, met_by

LENGTH = 8
SUFFIX = {"method": "hsd", "num_speculative_tokens": LENGTH, "levels": [{"suffix": {}}]}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Situation:
    """What the advice depends on.

    Attributes:
        device: vLLM's name of the kind of device, as in "cpu" or "cuda".
        mtp_layers: layers of the model that predict further tokens.
        recurrent: whether the model keeps a state from which rejected tokens cannot be dropped.
    """

    device: str
    mtp_layers: int
    recurrent: bool


@dataclass(frozen=True)
class Advice:
    """A configuration to start with (None: no speculation), why, and what to compare it with."""

    config: dict[str, Any] | None
    why: str
    others: list[dict[str, Any]]


def advice(situation: Situation) -> Advice:
    """What to start with; every sentence of `why` says what was measured and what was not."""
    if situation.recurrent and situation.device == "cpu":
        return Advice(
            None,
            "Its recurrent layers keep a state, of which vLLM on a CPU loses what rejected tokens "
            "have overwritten: its own n-gram method changed the texts of such models.",
            [],
        )
    if situation.mtp_layers:
        own = {"method": "mtp", "num_speculative_tokens": situation.mtp_layers}
        return Advice(
            {**own, "rejection_sample_method": "hierarchical"},
            "The model brings layers that draft for it; block verification keeps longer prefixes "
            "of their drafts. Not measured by us: no such model fits our machines.",
            [own],
        )
    if situation.device == "cpu":
        return Advice(
            SUFFIX,
            "Lookups in the request's own text cost next to nothing, and draft lengths follow "
            "acceptance and load, down to no draft. Chats, code edits and summaries gain most.",
            [NGRAM],
        )
    if situation.recurrent:
        return Advice(
            None,
            "Its recurrent layers keep a state for every draft token under vLLM's own methods. "
            'Cascades of lookups and models do so only with the key "untested": none ever ran on '
            "a GPU.",
            [NGRAM, {**SUFFIX, "untested": True}],
        )
    return Advice(
        NGRAM,
        "Nothing of this package has been measured on a GPU. Where a trained EAGLE-3 head or a "
        "small model of the same tokenizer exists, compare it: "
        '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5, '
        '"rejection_sample_method": "hierarchical"}.',
        [SUFFIX],
    )


def situation_of(model: str) -> Situation:
    """Reads the model's configuration and this machine; loads no weights."""
    from transformers import AutoConfig
    from vllm.platforms import current_platform

    try:
        config = AutoConfig.from_pretrained(model).get_text_config()
        mtp_layers = int(getattr(config, "num_nextn_predict_layers", 0) or 0)
    except Exception as error:  # whatever a config.json makes transformers raise
        raise UserError(f"--model {quoted(model)} cannot be read ({brief(error)}).") from error
    kinds = set(getattr(config, "layer_types", None) or ())
    states = ("ssm_cfg", "mamba_d_state", "state_size", "ssm_state_size", "linear_num_key_heads")
    return Situation(
        device=current_platform.device_type,
        mtp_layers=max(mtp_layers, 0),
        recurrent=bool(kinds & {"linear_attention", "mamba", "recurrent", "conv"})
        or any(hasattr(config, name) for name in states),
    )


def _options(*configs: dict[str, Any] | None) -> list[str]:
    return [f"--speculative-config {shlex.quote(json.dumps(each))}" for each in configs if each]


def run(arguments: argparse.Namespace) -> int:
    """Check the user's own configuration, if one is given, and print the advice."""
    model, given = arguments.model, arguments.speculative_config
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    situation = situation_of(model)
    found = advice(situation)
    lines = [f"{situation.device} ({system.processor()}, {system.cores()} cores), {model}"]
    if given is not None:
        valid, *faults = configuration_findings(model, given, ())
        lines += ["", f"Yours: {valid.text}."]
        lines += [f"  {fault.text[0].upper()}{fault.text[1:]}." for fault in faults]
    name, option = shlex.quote(model), _options(found.config)
    serve = shlex.join(system.serve_command(model))
    why = [found.why]
    if found.config and situation.device == "cpu":
        choice = choose_dtype(model)
        if choice.dtype == EXACT:
            # vLLM would take bfloat16.
            serve += f" --dtype {EXACT}"
            why.append(f"{EXACT}: {choice.reason}.")
    lines += ["", "Start with:", "", f"  {' '.join([serve, *option])}", "", *why]
    compared = _options(found.config, *found.others)
    if given is not None:
        compared.append(f"--speculative-config {shlex.quote(given)}")
    bench = f"  vllm-hsd bench --model {name} --prompts YOURS.jsonl"
    if compared:
        lines += [
            "",
            "Then measure, on prompts of yours:",
            "",
            " \\\n    ".join([bench, *compared]),
        ]
        for other in found.others:
            ours = other["method"] == "hsd"
            combination = Combination(other["method"], ours, situation.device, "V2")
            lines += [f"  {other['method']}: {text}." for text in met_by(combination)]
    if found.config:
        lines.append(f"  vllm-hsd verify --model {name} {option[0]}")
    lines.append(
        "\nSmaller models of the same tokenizer, a quantized copy, or early exits: `vllm-hsd "
        f"profile` --target {name} --models ... measures them, `vllm-hsd plan` finds the best "
        "cascade."
    )
    print("\n".join(lines))
    return 0


def add_parser(commands: Any) -> None:
    """Adds `advise` to the commands."""
    parser = commands.add_parser(
        "advise",
        help="print the `vllm serve` line to start with on this machine, and what to measure",
        description="Reads the model's configuration, the device and what is installed, and prints "
        "the command to start with. Loads no weights; on a CPU it tries, once, which dtype is "
        "faster.",
        epilog="example:\n  vllm-hsd advise --model Qwen/Qwen3-8B\n",
    )
    parser.add_argument("--model", required=True, help="the target: a name or a directory")
    parser.add_argument(
        "--speculative-config", metavar="JSON", help="yours, to be checked and compared"
    )
    parser.set_defaults(run=run)
