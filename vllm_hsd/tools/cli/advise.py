"""`vllm-hsd advise`: the command to serve with on this machine, and what to measure."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from vllm_hsd.errors import UserError, brief, quoted
from vllm_hsd.host.engine_hooks import STOCK_METHODS
from vllm_hsd.tools import system
from vllm_hsd.tools.cli.doctor import configuration_findings
from vllm_hsd.tools.dtype import choose_dtype
from vllm_hsd.tools.known_faults import Combination, met_by

LENGTH = 8
SUFFIX = {"method": "hsd", "num_speculative_tokens": LENGTH, "levels": [{"suffix": {}}]}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Situation:
    """What the advice depends on.

    Attributes:
        device: vLLM's name of the kind of device, as in "cpu" or "cuda".
        drafter: vLLM's configuration of the drafter that the checkpoint brings; None without one.
        recurrent: whether the model keeps a state from which rejected tokens cannot be dropped.
    """

    device: str
    drafter: dict[str, Any] | None
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
    if situation.drafter and (situation.device != "cpu" or _verified_by_us(situation.drafter)):
        return _with_drafter(situation.device, situation.drafter)
    if situation.device == "cpu":
        return Advice(
            SUFFIX,
            "Lookups in the request's own text cost next to nothing, and draft lengths follow "
            "acceptance and load, down to no draft. Code, edits and summaries gain most, chats "
            "least.",
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
        "No engine of this package was timed on a GPU. Where a drafter was trained for the "
        "model (EAGLE-3, DFlash, DSpark), or a small model has its tokenizer, vLLM's own method is "
        'the one to beat: {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5}.',
        [SUFFIX],
    )


def _verified_by_us(own: dict[str, Any]) -> bool:
    """Whether "hierarchical" takes a drafter: on V2, which drafts in parallel for DFlash alone."""
    return own["method"] in STOCK_METHODS and not own.get("parallel_drafting")


def _with_drafter(device: str, own: dict[str, Any]) -> Advice:
    """For a model that brings a drafter: vLLM drafts with it, and on a CPU we verify."""
    ours = {**own, "rejection_sample_method": "hierarchical"}
    brought = f"The checkpoint brings a drafter, which vLLM serves as method {own['method']!r}."
    unmeasured = "Not measured by us: no such model fits our machines."
    if device == "cpu":
        block = "Block verification keeps longer prefixes of its drafts."
        return Advice(ours, f"{brought} {block} {unmeasured}", [own])
    others = [ours] if _verified_by_us(own) else []
    if own["method"] == "dspark":
        others = [{**own, "enable_adaptive_verification": True}]
    return Advice(
        own,
        f"{brought} Where large batches make it slow, `num_speculative_tokens_per_batch_size` "
        f"shortens its drafts. {unmeasured}",
        others,
    )


@contextlib.contextmanager
def _reading(model: str) -> Iterator[None]:
    """Turns what vLLM or transformers raise and log of a configuration into one sentence."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    except Exception as error:  # whatever a config.json makes them raise
        raise UserError(f"--model {quoted(model)} cannot be read ({brief(error)}).") from error
    finally:
        logging.disable(disabled)


def target_of(model: str) -> tuple[str, dict[str, Any] | None]:
    """The target of a checkpoint, and the drafter that it is (speculators' format) or brings.

    Raises:
        UserError: its configuration cannot be read, or vLLM does not import.
    """
    try:
        from vllm.config.speculative import MTPModelTypes, SpeculativeConfig
        from vllm.transformers_utils.config import get_config, maybe_override_with_speculators
    except Exception as error:  # whatever it or what it needs raises
        raise UserError(f"vLLM does not import ({brief(error)}): see `vllm-hsd doctor`.") from error

    with _reading(model):
        target, _, own = maybe_override_with_speculators(model, None, trust_remote_code=False)
        if own:
            return target, own
        config = get_config(model, trust_remote_code=False)
        if block := getattr(config, "dspark_block_size", None):
            return model, {"method": "dspark", "num_speculative_tokens": int(block)}
        # vLLM knows the names of these layers in each family.
        draft = SpeculativeConfig.hf_config_override(config) if config.architectures else config
        layers = int(getattr(draft, "n_predict", 0) or 0)
    if draft.model_type not in get_args(MTPModelTypes) or layers < 1:
        return model, None
    return model, {"method": "mtp", "num_speculative_tokens": layers}


def situation_of(model: str, drafter: dict[str, Any] | None) -> Situation:
    """Reads the target's configuration and this machine; loads no weights.

    Raises:
        UserError: its configuration cannot be read.
    """
    from vllm.platforms import current_platform
    from vllm.transformers_utils.config import get_config

    with _reading(model):
        config = get_config(model, trust_remote_code=False).get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ())
    states = (
        *("linear_attn_config", "linear_num_key_heads", "mamba_d_state", "ssm_cfg"),
        *("ssm_state_size", "state_size"),
    )
    recurrent = bool(kinds & {"linear_attention", "mamba", "recurrent", "conv"})
    # A family's configuration may describe states that this member has not.
    if not kinds or not all(kind.endswith("attention") for kind in kinds):
        recurrent |= any(hasattr(config, name) for name in states)
    return Situation(current_platform.device_type, drafter, recurrent)


def _options(*configs: dict[str, Any] | None) -> list[str]:
    return [f"--speculative-config {shlex.quote(json.dumps(each))}" for each in configs if each]


def _faults(situation: Situation, config: dict[str, Any], serve: list[str]) -> Iterator[str]:
    from vllm import envs

    ahead = envs.VLLM_USE_AOT_COMPILE and system.NO_AOT_COMPILE not in serve
    rule = config.get("rejection_sample_method", "standard")
    return met_by(
        Combination(
            method=config["method"],
            ours=config["method"] == "hsd" or rule == "hierarchical",
            device=situation.device,
            runner="V2",
            recurrent=situation.recurrent,
            adaptive_verification="enable_adaptive_verification" in config,
            # Models that bring such a drafter take several GPUs.
            tensor_parallel=2,
            # Servers on a CPU are compiled unless told.
            compiled_ahead=situation.device == "cpu" and ahead,
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the user's own configuration, if one is given, and print the advice."""
    given = arguments.speculative_config
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    model, drafter = target_of(arguments.model)
    situation = situation_of(model, drafter)
    found = advice(situation)
    lines = [f"{situation.device} ({system.processor()}), cores: {system.cores()}, {model}"]
    if given is not None:
        valid, *faults = configuration_findings(model, given, ())
        lines += ["", f"Yours: {valid.text}."]
        lines += [f"  {fault.text[0].upper()}{fault.text[1:]}." for fault in faults]
    name, option = shlex.quote(model), _options(found.config)
    command = system.serve_command(model)
    serve = shlex.join(command)
    why = [found.why]
    if found.config and situation.device == "cpu":
        choice = choose_dtype(model)
        # vLLM would go by the checkpoint.
        serve += f" --dtype {choice.dtype}"
        why.append(f"{choice.dtype}: {choice.reason}.")
        if choice.dtype != "float32":
            why.append(
                "There greedy and seeded texts part from those without speculation at near ties, "
                "which can be half of all answers; in float32 they hardly ever do."
            )
    if situation.device == "cpu":
        serve += f" --gpu-memory-utilization {system.free_memory():.2f}"
        why.append("Without that share of the memory, weights included, vLLM takes nearly all.")
    lines += ["", "Start with:", "", f"  {' '.join([serve, *option])}", "", *why]
    compared = _options(found.config, *found.others)
    if given is not None:
        compared.append(f"--speculative-config {shlex.quote(given)}")
    bench = f"  vllm-hsd bench --model {name} --prompts YOURS.jsonl"
    if compared:
        lines += [
            "",
            "Then measure, on prompts of yours (without --prompts, on questions that are built "
            "in); minutes, most of them for loading each engine:",
            "",
            " \\\n    ".join([bench, *compared]),
        ]
    if found.config:
        lines.append(f"  vllm-hsd verify --model {name} {option[0]}")
    smaller = (
        "\nSmaller models of the same tokenizer, a quantized copy, or early exits are measured by"
    )
    if situation.device == "cpu":
        planned = f"  vllm-hsd profile --target {name} --models ...\n"
        lines.append(f"{smaller}\n{planned}and `vllm-hsd plan` finds the best cascade.")
    else:
        lines.append(f"{smaller} `vllm-hsd bench` as well.")
    # Once each, in the table's order.
    known = dict.fromkeys(
        f"  {each['method']}: {text}."
        for each in filter(None, [found.config, *found.others])
        for text in _faults(situation, each, command)
    )
    if known:
        lines += ["", "Known faults of vLLM that these may meet:", "", *known]
    print("\n".join(lines))
    return 0


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "advise",
        help="print the command to serve with on this machine, and what to measure next",
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
