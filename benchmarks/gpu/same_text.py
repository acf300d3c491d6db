"""The tiny family's text with and without speculation, eager and captured, in float32.

A GPU rounds a forward pass of several tokens differently from several of one, in attention to ten
bits, so greedy texts may part where the target's two best logits nearly tie, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.common import prompts
from benchmarks.gpu import engines
from benchmarks.gpu.items import Finding, Setting
from vllm_hsd.cli.greedy import gaps_of_target
from vllm_hsd.engine import EngineProcess, Generation
from vllm_hsd.errors import UserError

# Largest gap of a near tie, in nats.
LARGEST_GAP = 0.02
# Of the drafts of a drafter that is the target: rounding may cost some.
EQUAL_MODELS = 0.995
PROMPTS, TOKENS = 8, 64
TOY_PROMPTS, TOY_TOKENS = 2, 6
# What holds where an engine with this variable answers: without it, it raises.
CHECKS = {
    "a proposal replayed as a CUDA graph equals the eager one": (
        "VLLM_HSD_CHECK_GRAPHS",
        "1",
    ),
    "no step waits for the device": ("VLLM_GPU_SYNC_CHECK", "error"),
}


def configurations(family: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Engine arguments by name; all are compared with no speculation."""
    small, mid = {"model": family["small"], "num_tokens": 2}, {"model": family["mid"]}
    levels = engines.cascade(5, small, mid)
    return {
        "cascade": {"speculative_config": levels},
        "cascade, eager": {"speculative_config": levels, "enforce_eager": True},
        "block verification": {
            "speculative_config": engines.draft_model(family["mid"], 4, "hierarchical")
        },
        "equal models": {"speculative_config": engines.cascade(4, {"model": family["target"]})},
    }


def run(setting: Setting, family: dict[str, str] = engines.TINY) -> Finding:
    """See the module.

    Args:
        family: directories of target, mid and small.
    """
    engines.require_vllm()
    count, tokens = (TOY_PROMPTS, TOY_TOKENS) if setting.toy else (PROMPTS, TOKENS)
    asked = prompts(count)
    greedy = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    seeded = [greedy | {"temperature": 0.8, "seed": i} for i in range(count)]
    plain_args = engines.TINY_ARGS | {"model": family["target"]}
    found: dict[str, tuple[Generation, Generation]] = {}
    lines, left_out = [], []
    with engines.engine(setting, "text plain", plain_args) as plain:
        expected = plain.generate(asked, greedy)
        ids = plain.call(prompt_ids, asked)
        for name, arguments in configurations(family).items():
            with engines.engine(setting, f"text {name}", plain_args | arguments) as process:
                found[name] = process.generate(asked, greedy), process.generate(asked, seeded)
                seen = engines.described(process)
            lines.append(greedy_line(name, ids, expected, found[name][0], plain))
            reason = engines.eager_reason(seen)
            if name == "cascade" and reason:
                left_out.append(f"captured against eager: {reason}.")
    captured, eager = found["cascade"][1], found["cascade, eager"][1]
    if captured.token_ids != eager.token_ids:
        differ = sum(a != b for a, b in zip(captured.token_ids, eager.token_ids, strict=True))
        pytest.fail(f"{differ} of {count} seeded texts differ between captured and eager.")
    lines.append(f"Seeded text at temperature 0.8: {count} of {count} equal, captured and eager.")
    equal = found["equal models"][1]
    rate = equal.accepted / max(equal.drafted, 1)
    if rate < EQUAL_MODELS:
        pytest.fail(f"A drafter equal to the target: only {rate:.4f} accepted.")
    lines.append(f"A drafter equal to the target: {rate:.4f} of {equal.drafted} accepted.")
    for claim, variable in CHECKS.items():
        if setting.time_left() < engines.ENGINE_SECONDS:
            left_out.append(f"{claim}: no time left.")
        elif not setting.toy:
            _check(setting, plain_args | configurations(family)["cascade"], asked, *variable)
            lines.append(f"The cascade's engine with {'='.join(variable)}: {claim}.")
    return Finding(lines, left_out=left_out)


def _check(
    setting: Setting, arguments: dict[str, Any], asked: list[str], name: str, value: str
) -> None:
    params = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True}
    label = f"text {name}"
    with engines.engine(setting, label, arguments, environment={name: value}) as process:
        try:
            process.generate(asked, params)
        except UserError as error:
            pytest.fail(f"with {name}={value}, {error}")


def greedy_line(
    name: str,
    asked: list[list[int]],
    expected: Generation,
    got: Generation,
    plain: EngineProcess,
) -> str:
    """What an engine's greedy texts are, next to those of no speculation.

    Args:
        name: of its configuration.
        asked: token ids of the prompts.
        expected, got: answers without speculation, and of the engine.
        plain: the engine without speculation.

    Raises:
        pytest.fail.Exception: they differ where the target's two best logits do not nearly tie.
    """
    places = []
    for prompt, theirs, ours in zip(asked, expected.token_ids, got.token_ids, strict=True):
        if len(theirs) != len(ours):
            pytest.fail(f"{name}: {len(ours)} tokens in place of {len(theirs)}.")
        at = next((i for i, token in enumerate(theirs) if token != ours[i]), None)
        if at is not None:
            places.append(((*prompt, *theirs[:at]), theirs[at], ours[at]))
    if not places:
        return f"{name}: greedy text equals that of no speculation, {len(asked)} prompts."
    gaps = plain.call(gaps_of_target, places)
    if max(gaps) > LARGEST_GAP:
        pytest.fail(
            f"{name}: {len(places)} of {len(asked)} greedy texts differ, where the target's "
            f"logits are up to {max(gaps):.3g} nats apart (bound {LARGEST_GAP:g})."
        )
    return (
        f"{name}: {len(places)} of {len(asked)} greedy texts part at near ties, the largest "
        f"gap {max(gaps):.2g} nats."
    )


def prompt_ids(llm: Any, texts: list[str]) -> list[list[int]]:
    """Runs in the engine's process."""
    tokenizer = llm.get_tokenizer()
    return [tokenizer.encode(text) for text in texts]
