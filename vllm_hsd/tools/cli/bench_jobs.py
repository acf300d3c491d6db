"""What `vllm-hsd bench` compares, and what it measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_hsd.levels.any_kind import level_name
from vllm_hsd.tools.engine import Generation

# In place of a token where an output has ended.
NONE = -1


def _rows(config: dict[str, Any] | None) -> int:
    """Drafts of a request that a configuration may verify together."""
    given = (config or {}).get("levels")
    levels = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    rows = [each.get("branches", 1) for each in levels]
    return max([1, *(each for each in rows if isinstance(each, int))])


@dataclass(frozen=True)
class Comparison:
    """What to measure.

    Attributes:
        configs: speculative configurations, None for no speculation; the first is None, which all
            are compared with, a later None too.
        prompts: texts, or chats of one message.
        sampling: further arguments of `vllm.SamplingParams` by prompt, or none at all.
        num_prompts: prompts per round; the given ones are repeated if they are fewer.
        rounds: repetitions of everything; the spread is over these.
        engine_args: further arguments of `vllm.LLM`.
        output: directory for results and the engines' logs.
    """

    model: str
    configs: Sequence[dict[str, Any] | None]
    prompts: Sequence[str | list[dict[str, str]]]
    batch_sizes: Sequence[int]
    temperatures: Sequence[float]
    max_tokens: int
    num_prompts: int
    rounds: int
    engine_args: dict[str, Any]
    output: Path
    sampling: Sequence[dict[str, Any]] = ()

    @property
    def names(self) -> list[str]:
        """Short names of the configurations, no two equal."""
        names: list[str] = []
        for config in self.configs:
            name = config_name(config)
            names.append(f"{name} ({len(names)})" if name in names else name)
        return names

    @property
    def base_args(self) -> dict[str, Any]:
        """Arguments of the engine without speculation, as far as they are known before it runs."""
        sizes = self.batch_sizes
        return {
            "model": self.model,
            # Rows of attention, for the branches of the smallest batch at least.
            "max_num_seqs": max(*sizes, min(sizes) * max(map(_rows, self.configs))),
            # A prompt must cost the same every time.
            "enable_prefix_caching": False,
            **self.engine_args,
        }

    def sampling_of(self, prompt: int) -> dict[str, Any]:
        """Further arguments of `vllm.SamplingParams` for a prompt by its index in a round."""
        return self.sampling[prompt % len(self.sampling)] if self.sampling else {}

    def prompt_batches(self, batch_size: int) -> list[tuple[int, ...]]:
        """Indices of prompts, in full batches."""
        return [
            tuple(i % self.num_prompts for i in range(first, first + batch_size))
            for first in range(0, self.num_prompts, batch_size)
        ]


@dataclass(frozen=True)
class Setup:
    """What vLLM says about a comparison before it runs.

    Attributes:
        errors: objection to each configuration, or None.
        prompt_ids: token ids of the prompts.
        request_keys: keys in `extra_args` that requests may have, by configuration.
        available_memory: bytes of host memory.
        cut: a sentence if prompts were too long, or nothing.
    """

    errors: list[str | None]
    prompt_ids: list[list[int]] = field(default_factory=list)
    has_chat_template: bool = False
    max_model_len: int = 0
    dtype: str = ""
    device: str = ""
    threads: int = 1
    available_memory: int = 0
    request_keys: Sequence[set[str]] = ()
    cut: str = ""


@dataclass(frozen=True)
class Job:
    """One batch of prompts for one configuration."""

    config: int
    round: int
    batch_size: int
    temperature: float
    part: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class Difference:
    """The first token of a greedy output that is not the one without speculation.

    Attributes:
        job, sequence: the generation, and which of its outputs.
        context: token ids of the prompt and of the output before that token.
        expected, found: the token without speculation, and the other one; NONE after an end.
        gap: by how much the less likely of the two falls short of the target's most likely token,
            in nats, without speculation; infinite if one of them is no token or nothing looked.
    """

    job: Job
    sequence: int
    context: tuple[int, ...]
    expected: int
    found: int
    gap: float = math.inf


@dataclass
class Results:
    """What was measured.

    Attributes:
        loads: of every job, cores that other processes used meanwhile, and share of stolen time.
        errors: why a configuration (by index) could not run.
        differences: greedy outputs that are not those of no speculation.
    """

    comparison: Comparison
    generations: dict[Job, Generation] = field(default_factory=dict)
    loads: dict[Job, tuple[float, float]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)


def config_name(config: dict[str, Any] | None) -> str:
    """A short name of a speculative configuration."""
    if config is None:
        return "no speculation"
    length, levels = config.get("num_speculative_tokens"), config.get("levels")
    if isinstance(levels, list) and levels:
        parts = [
            f"{level_name(level)} {level.get('num_tokens', length if level is levels[-1] else '')}"
            for level in levels
            if isinstance(level, dict)
        ]
        name = ", ".join(part.strip() for part in parts)
    else:
        source = config.get("cascade") or config.get("model")
        method = str(config.get("method", "draft_model"))
        parts = [method, Path(source).name if isinstance(source, str) else "", str(length or "")]
        name = " ".join(part for part in parts if part)
    rule = config.get("verifier") or config.get("rejection_sample_method")
    return f"{name} ({rule})" if rule else name
