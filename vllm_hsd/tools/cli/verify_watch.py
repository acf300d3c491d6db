"""`vllm-hsd verify --watch`: a canary beside a server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_hsd.checked_files import write_json
from vllm_hsd.errors import UserError, brief
from vllm_hsd.tools.audit.canary import Canary
from vllm_hsd.tools.audit.other_servers import connect
from vllm_hsd.tools.audit.sampled import Setting, refuse_coarse
from vllm_hsd.tools.audit.servers import TOP_K
from vllm_hsd.tools.audit.statistics import ERROR_PROBABILITY
from vllm_hsd.tools.cli import bench
from vllm_hsd.tools.cli.options import progress
from vllm_hsd.tools.cli.verify_report import ANSWER_TOKENS
from vllm_hsd.tools.cli.verify_runs import judged_dtype
from vllm_hsd.tools.planner.prompts import refuse_sampling

# Answers between two looks at the p-value.
AT_ONCE = 8
FILE = "watch.json"


def command(arguments: argparse.Namespace) -> int:
    """Run `vllm-hsd verify --watch`; 1 as soon as the p-value falls below ERROR_PROBABILITY."""
    if not arguments.plain_url:
        raise UserError("--watch needs --plain-url: a server of the model without speculation.")
    temperatures = [t for t in bench.temperatures(arguments) if t > 0]
    if not temperatures:
        raise UserError("--watch samples: give --temperatures above 0.")
    served = connect("--watch", arguments.watch, at_once=AT_ONCE)
    plain = connect("--plain-url", arguments.plain_url, served.model, at_once=AT_ONCE)
    arguments.model = served.model
    comparison = bench.comparison_of(
        arguments, [], batch_sizes=[AT_ONCE], temperatures=temperatures,
        max_tokens=ANSWER_TOKENS, num_prompts=1, rounds=1,
    )  # fmt: skip
    refuse_sampling(comparison.sampling)
    prompts = [plain.token_ids(prompt) for prompt in comparison.prompts]
    dtype = judged_dtype(arguments.dtype)
    refuse_coarse(dtype, [Setting(temperature) for temperature in temperatures])
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output '{arguments.output}' cannot be used ({error}).") from None
    path = arguments.output / FILE
    canary = _read(path, Canary(dtype, served.model, served.url))
    before = canary.tokens
    # The uniforms must not be those of an earlier run that this one goes on from.
    rng, until = np.random.default_rng([before, *b"watch"]), before + arguments.tokens
    while canary.tokens < until and canary.p_value >= ERROR_PROBABILITY:
        first = canary.answers
        params: list[dict[str, Any]] = [
            {
                # Every prompt meets every temperature.
                "temperature": temperatures[sum(divmod(i, len(prompts))) % len(temperatures)],
                "top_k": TOP_K,
                "max_tokens": ANSWER_TOKENS,
                "ignore_eos": True,
            }
            for i in range(first, first + AT_ONCE)
        ]
        asked = [prompts[i % len(prompts)] for i in range(first, first + AT_ONCE)]
        found = served.generate(asked, params)
        ranges, _ = plain.score(asked, found.token_ids, params, {})
        for own, lengths in zip(ranges, found.step_lengths, strict=True):
            canary.observe(own, lengths, rng)
        write_json(path, canary.document())
        progress(f"{canary.tokens} tokens of {canary.answers} answers, p {canary.p_value:.2g}")
    failed = canary.p_value < ERROR_PROBABILITY
    verdict = "NOT LOSSLESS" if failed else "nothing speaks against it"
    if canary.tokens == before:
        verdict += " (an earlier run's verdict; nothing was asked)"
    print(
        f"{canary.tokens} tokens of {canary.answers} answers of {arguments.watch}, p "
        f"{canary.p_value:.2g} at any time: {verdict}. Written: {path}"
    )
    return 1 if failed else 0


def _read(path: Path, fresh: Canary) -> Canary:
    """What an earlier run found, if there was one."""
    if not path.exists():
        return fresh
    try:
        canary = Canary(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"'{path}' cannot be read ({brief(error)}): remove it.") from None
    for key in ("model", "url", "dtype"):
        theirs, mine = getattr(canary, key), getattr(fresh, key)
        if theirs != mine:
            raise UserError(
                f"'{path}' is of the {key} '{theirs}', not '{mine}': give another --output, or "
                "remove it."
            )
    return canary
