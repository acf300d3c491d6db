"""The tiny family's text with and without speculation, eager and captured, in float32.

A GPU rounds a forward pass of several tokens differently from several of one, in attention to ten
bits, so greedy texts may part where the target's two best logits nearly tie, and nowhere else.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest

from benchmarks.common import MODELS, on_worker
from benchmarks.gpu import engines, graph_checks
from benchmarks.gpu.items import PART_SECONDS, Finding, Setting
from vllm_hsd.errors import UserError
from vllm_hsd.tools.cli.greedy import gaps_of_target
from vllm_hsd.tools.engine import EngineProcess, Generation
from vllm_hsd.tools.planner.prompts import read_prompts

# Largest gap of a near tie, in nats.
LARGEST_GAP = 0.02
# Of the drafts of a drafter that is the target: rounding may cost some.
EQUAL_MODELS = 0.995
PROMPTS, TOKENS = 8, 64
TOY_PROMPTS, TOY_TOKENS = 2, 6
# What holds where such an engine answers: otherwise it raises.
NO_WAITS = "no step waits for the device"
GRAPHS = "a proposal replayed as a CUDA graph equals the eager one"


def configurations(family: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Engine arguments by name; all are compared with no speculation."""
    small, mid = {"model": family["small"], "num_tokens": 2}, {"model": family["mid"]}
    levels = engines.cascade(5, small, mid)
    # By the default of a CPU it would draft nothing: a pass costs what one of the target does.
    equal = engines.cascade(4, {"model": family["target"]}, adaptive=False)
    return {
        "cascade": {"speculative_config": levels},
        "cascade, eager": {"speculative_config": levels, "enforce_eager": True},
        "block verification": {
            "speculative_config": engines.draft_model(family["mid"], 4, "hierarchical")
        },
        "equal models": {"speculative_config": equal},
    }


def run(setting: Setting, family: dict[str, str] = engines.TINY) -> Finding:
    """Greedy and seeded text with and without speculation, eager and captured.

    Args:
        family: directories of target, mid and small.
    """
    engines.require_vllm()
    count, tokens = (TOY_PROMPTS, TOY_TOKENS) if setting.toy else (PROMPTS, TOKENS)
    asked = read_prompts(MODELS / "prompts.jsonl")[:count]
    greedy = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    sampled = greedy | {"temperature": 0.8}
    seeded = [sampled | {"seed": i} for i in range(count)]
    plain_args = engines.TINY_ARGS | {"model": family["target"]}
    parts: dict[str, dict[str, Any]] = {}
    waiting = []
    with Plain(setting, "text plain", plain_args, asked, greedy) as plain:

        def compared(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
            with engines.engine(setting, f"text {name}", plain_args | arguments) as process:
                text, seeded_text = process.generate(asked, greedy), process.generate(asked, seeded)
                # Requests without a seed: of those with one, drafts change nothing.
                free = process.generate(asked, [sampled] * count)
                seen = engines.described(process)
            if not setting.toy and not min(text.drafted, free.drafted):
                pytest.fail(f"{name}: nothing was drafted.")
            return {
                "line": plain.greedy_line(name, text),
                "seeded": seeded_text.token_ids,
                "drafted": free.drafted,
                "accepted": free.accepted,
                "eager": engines.eager_reason(seen),
            }

        for name, arguments in configurations(family).items():
            seconds = plain.seconds(PART_SECONDS)
            part = setting.part(name, partial(compared, name, arguments), seconds)
            if part is None:
                waiting.append(name)
            else:
                parts[name] = part
    lines = [part["line"] for part in parts.values()]
    left_out = []
    if reason := parts.get("cascade", {}).get("eager"):
        left_out.append(f"captured against eager: {reason}.")
    if parts.keys() >= {"cascade", "cascade, eager"}:
        captured, eager = (parts[name]["seeded"] for name in ("cascade", "cascade, eager"))
        if captured != eager:
            differ = sum(a != b for a, b in zip(captured, eager, strict=True))
            pytest.fail(f"{differ} of {count} seeded texts differ between captured and eager.")
        lines.append(f"Seeded text at temperature 0.8: {count} of {count} equal, captured, eager.")
    if equal := parts.get("equal models"):
        rate = equal["accepted"] / max(equal["drafted"], 1)
        if equal["drafted"] and rate < EQUAL_MODELS:
            pytest.fail(f"A drafter equal to the target: only {rate:.4f} accepted.")
        drafted = equal["drafted"]
        lines.append(f"A drafter equal to the target, no seeds: {rate:.4f} of {drafted} accepted.")
    for claim in () if setting.toy else (GRAPHS, NO_WAITS):
        arguments = plain_args | configurations(family)["cascade"]
        if setting.part(claim, partial(_check, setting, arguments, asked, claim)) is None:
            waiting.append(claim)
        else:
            lines.append(f"The cascade's engine, checked: {claim}.")
    return Finding(lines, left_out=left_out, waiting=waiting)


def _check(
    setting: Setting, arguments: dict[str, Any], asked: list[str], claim: str
) -> dict[str, Any]:
    params = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True}
    environment = {"VLLM_GPU_SYNC_CHECK": "error"} if claim == NO_WAITS else {}
    label = f"text, {claim}"
    with engines.engine(setting, label, arguments, environment=environment) as process:
        if claim == GRAPHS:
            process.call(on_worker, _watch_graphs)
        try:
            process.generate(asked, params)
        except UserError as error:
            pytest.fail(f"{claim}: {error}")
    return {}


def _watch_graphs(worker: Any) -> None:
    graph_checks.watch(worker.model_runner.speculator)


class Plain(contextlib.AbstractContextManager):
    """The engine without speculation, which starts when a part of an item first needs it.

    Args:
        name: of its log.
        arguments: of the engine.
        asked: prompts.
        params: of the greedy texts that it is asked for.
    """

    def __init__(
        self,
        setting: Setting,
        name: str,
        arguments: dict[str, Any],
        asked: list[str],
        params: dict[str, Any],
    ) -> None:
        self.made = partial(engines.engine, setting, name, arguments)
        self.asked, self.params = asked, params
        self.stack = contextlib.ExitStack()
        self.process: EngineProcess | None = None
        self.expected: Generation
        self.ids: list[list[int]]

    def __exit__(self, *raised: Any) -> None:
        self.stack.close()

    def seconds(self, seconds: float) -> float:
        """What a part of so many seconds takes, with the start of this engine."""
        return seconds if self.process is not None else 2 * seconds

    def greedy_line(self, name: str, got: Generation) -> str:
        """What an engine's greedy texts are, next to those of this engine, which then starts.

        Args:
            name: of its configuration.

        Raises:
            pytest.fail.Exception: they differ where the target's two best logits do not nearly tie.
        """
        if self.process is None:
            self.process = self.stack.enter_context(self.made())
            self.expected = self.process.generate(self.asked, self.params)
            self.ids = self.process.call(prompt_ids, self.asked)
        places = []
        texts = zip(self.ids, self.expected.token_ids, got.token_ids, strict=True)
        for prompt, theirs, ours in texts:
            if len(theirs) != len(ours):
                pytest.fail(f"{name}: {len(ours)} tokens in place of {len(theirs)}.")
            at = next((i for i, token in enumerate(theirs) if token != ours[i]), None)
            if at is not None:
                places.append(((*prompt, *theirs[:at]), theirs[at], ours[at]))
        count = len(self.asked)
        if not places:
            return f"{name}: greedy text equals that of no speculation, {count} prompts."
        gaps = self.process.call(gaps_of_target, places)
        if max(gaps) > LARGEST_GAP:
            pytest.fail(
                f"{name}: {len(places)} of {count} greedy texts differ, where the target's "
                f"logits are up to {max(gaps):.3g} nats apart (bound {LARGEST_GAP:g})."
            )
        return (
            f"{name}: {len(places)} of {count} greedy texts part at near ties, the largest "
            f"gap {max(gaps):.2g} nats."
        )


def prompt_ids(llm: Any, texts: list[str]) -> list[list[int]]:
    """Runs in the engine's process."""
    tokenizer = llm.get_tokenizer()
    return [tokenizer.encode(text) for text in texts]
