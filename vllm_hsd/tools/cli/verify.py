"""`vllm-hsd verify`: whether a speculative configuration changes the text of a user's own model."""

from __future__ import annotations

import argparse
from typing import Any

from vllm_hsd.errors import UserError
from vllm_hsd.tools.cli.options import add_engine_options, numbers

# See `tools.audit.workloads`.
WORKLOADS = (
    "steady", "turns", "crowd16", "crowd64", "thinking", "schemas", "stops", "chunks", "preempted",
    "adapters",
)  # fmt: skip

# Calls that read few of the options: which ones.
FEW_OPTIONS = {
    "watch": ("plain_url", "tokens", "temperatures", "prompts", "dtype", "output"),
    "self_test": ("tokens", "output"),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="test that a speculative configuration leaves your model's text as it is",
        description="Test that a speculative configuration, one of vLLM's own too, is lossless: "
        "sampled tokens follow the target's probabilities, greedy text is that of no speculation. "
        "Prints one page and writes verify.json.",
        epilog="example:\n"
        "  vllm-hsd verify --model Qwen/Qwen3-8B --speculative-config '{\n"
        '    "method": "hsd", "num_speculative_tokens": 8, "levels": [{"ngram": {"max": 4},\n'
        '    "num_tokens": 4}, {"model": "Qwen/Qwen3-0.6B"}]}'
        "'",
    )
    add = parser.add_argument
    add("--model", help="the target: a name or a directory")
    add("--speculative-config", metavar="JSON", help="as for `vllm serve`")
    add(
        "--url", metavar="URL",
        help="verify a running OpenAI server of vLLM instead, such as http://localhost:8000, with "
        "the key in VLLM_API_KEY if it has one; text is sampled with top_k 16, since a server "
        "gives out 20 log-probabilities",
    )  # fmt: skip
    add("--plain-url", metavar="URL", help="a server of the same model without speculation")
    add(
        "--watch", metavar="URL",
        help="a canary: ask a running server for answers, --tokens in all, score each by one "
        "prompt of --plain-url, go on from the watch.json of the last call, and end with status 1 "
        "as soon as the running p-value falls below 1e-4",
    )  # fmt: skip
    add(
        "--drafter", metavar="MODEL",
        help="with --url: the model that the server drafts with, which is then loaded here; "
        "without it a sampler that leans towards its drafter is found late or not at all",
    )  # fmt: skip
    add(
        "--self-test", action="store_true",
        help="verify deliberately broken samplers on two small models that are made for it; each "
        "must be found. Needs no --model",
    )  # fmt: skip
    add("--top-p", type=numbers, default="1", metavar="P[,P...]", help="values of top_p")
    add(
        "--tokens", type=int, default=16384, metavar="N",
        help="sampled tokens for every temperature and top-p; four times as many find a deviation "
        "of half the size",
    )  # fmt: skip
    add(
        "--equal-drafter", action="store_true",
        help="also serve the model as its own drafter, which must have everything accepted",
    )  # fmt: skip
    add(
        "--workload", type=_workloads, default="all", metavar="NAME[,NAME...]",
        help=f"what is served, of {', '.join(WORKLOADS)}: all within the same number of tokens, of "
        "which the steady requests get half",
    )  # fmt: skip
    add(
        "--adapters", type=lambda text: text.split(","), default=(), metavar="DIR[,DIR...]",
        help="LoRA adapters of the model, which workload `adapters` serves in one batch",
    )  # fmt: skip
    add(
        "--as-served", action="store_true",
        help="sample with the draft lengths and the batches that the configuration serves with; "
        "without it drafts are as long as it allows and batches small, which shows most",
    )  # fmt: skip
    add_engine_options(parser, "0,0.7,1", "verify")
    parser.set_defaults(run=command, parser=parser)


def _workloads(text: str) -> list[str]:
    return list(WORKLOADS) if text == "all" else text.split(",")


def command(arguments: argparse.Namespace) -> int:
    """Run `vllm-hsd verify`; see `verify_runs.command`."""
    given, default = vars(arguments), vars(arguments.parser.parse_args([]))
    for option, taken in FEW_OPTIONS.items():
        others = [k for k in given if given[k] != default[k] and k not in (option, *taken)]
        if given[option] and others:
            name, other, *own = ("--" + k.replace("_", "-") for k in (option, others[0], *taken))
            raise UserError(f"{name} reads {', '.join(own)} alone: leave out {other}.")
    # torch and scipy, which a parser must not import.
    from vllm_hsd.tools.cli import verify_runs, verify_watch
    from vllm_hsd.tools.cli.verify_report import ANSWER_TOKENS

    if arguments.tokens < ANSWER_TOKENS:
        raise UserError(f"--tokens must be at least {ANSWER_TOKENS}, one answer.")
    return (verify_watch if arguments.watch else verify_runs).command(arguments)
