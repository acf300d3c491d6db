"""`vllm-hsd profile` and `vllm-hsd plan`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_hsd.errors import UserError

# Steps that vary by more than this, relatively, are reported.
UNREST = 0.15


def add_parsers(subparsers) -> None:
    """Add both commands; each sets `run`, a function of the parsed arguments -> exit status.

    `run` raises UserError, one sentence for the user.
    """
    profile = subparsers.add_parser(
        "profile", help="measure costs and acceptance of candidate drafters on this machine"
    )
    profile.add_argument("--target", required=True, help="path or hub name of the target")
    profile.add_argument("--candidates", nargs="*", default=[], metavar="MODEL")
    profile.add_argument(
        "--early-exits", nargs="*", type=int, default=[], metavar="LAYERS",
        help="the target's first LAYERS layers as candidates",
    )  # fmt: skip
    profile.add_argument(
        "--prompts", type=Path, default=None, metavar="FILE",
        help="JSON lines (.jsonl) with 'turns' or 'prompt', or text with blank lines between; "
        "without, the target writes texts of its own",
    )  # fmt: skip
    profile.add_argument("--max-prompts", type=int, default=64, help="prompts that are read")
    profile.add_argument("--temperature", type=float, default=1.0)
    profile.add_argument("--top-p", type=float, default=1.0)
    profile.add_argument("--max-draft-tokens", type=int, default=16, help="longest draft covered")
    profile.add_argument("--batch-sizes", nargs="+", type=int, default=[1], metavar="N")
    profile.add_argument(
        "--engine-args", type=_object, default={}, metavar="JSON",
        help="further arguments of vLLM's LLM() for the measurement of times",
    )  # fmt: skip
    profile.add_argument("--seed", type=int, default=0)
    profile.add_argument("--device", default=None, help="of the law measurement (cuda or cpu)")
    profile.add_argument(
        "--skip-timing", action="store_true",
        help="measure acceptance only; `plan` needs the costs too",
    )  # fmt: skip
    profile.add_argument("-o", "--output", type=Path, default=Path("profile.json"))
    profile.set_defaults(run=profile_command)

    plan = subparsers.add_parser("plan", help="choose the cascade for a profile")
    plan.add_argument("profile", type=Path)
    plan.add_argument("--max-levels", type=int, default=None, help="most drafters in a cascade")
    plan.add_argument(
        "--max-draft-tokens", type=int, default=None, help="longest draft of any level"
    )
    plan.add_argument("--batch-sizes", nargs="+", type=int, default=[1], metavar="N")
    plan.add_argument("--verifier", choices=("block", "standard"), default="block")
    plan.add_argument(
        "--acceptance", choices=("recorded", "independent"), default="recorded",
        help="from the recorded ratios, or powers of the mean rate",
    )  # fmt: skip
    plan.add_argument(
        "--output-tokens", type=int, default=None, help="tokens per request (default: endless)"
    )
    plan.add_argument("--plot", type=Path, default=None, metavar="DIR")
    plan.add_argument("-o", "--output", type=Path, default=Path("cascade.json"))
    plan.set_defaults(run=plan_command)


def _object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return parsed


def profile_command(arguments: argparse.Namespace) -> int:
    """Measure and write the profile file; an interrupted run continues where it was."""
    from vllm_hsd.planner.measure import Task, measure_profile

    if arguments.max_draft_tokens < 1 or arguments.max_prompts < 1:
        raise UserError("--max-draft-tokens and --max-prompts must be at least 1.")
    if min(arguments.batch_sizes) < 1:
        raise UserError("--batch-sizes must be at least 1.")
    console = Console(stderr=True)
    task = Task(
        target=arguments.target,
        candidates=arguments.candidates,
        early_exits=sorted(arguments.early_exits),
        prompts=arguments.prompts,
        max_prompts=arguments.max_prompts,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_draft_tokens,
        batch_sizes=sorted(set(arguments.batch_sizes)),
        engine_args=arguments.engine_args,
        seed=arguments.seed,
        device=arguments.device,
        costs=not arguments.skip_timing,
    )
    try:
        profile = measure_profile(task, arguments.output, console)
    except KeyboardInterrupt:
        console.print("interrupted; the same command continues where it was.")
        return 130
    profile.save(arguments.output)
    Console().print(rate_table(profile))
    if profile.costs and profile.costs.unrest() > UNREST:
        console.print(
            f"warning: equal steps took times that differ by +-{profile.costs.unrest():.0%}, so "
            f"predictions are no better; profile again when nothing else uses this machine.",
            style="yellow",
        )
    console.print(f"wrote {arguments.output}")
    return 0


def plan_command(arguments: argparse.Namespace) -> int:
    """Choose a cascade per batch size, explain it, and write it."""
    from vllm_hsd.planner import plan
    from vllm_hsd.planner.profile import environment_warnings, load_profile

    profile = load_profile(arguments.profile)
    if arguments.output_tokens is not None and arguments.output_tokens < 2:
        raise UserError(
            f"--output-tokens is {arguments.output_tokens}: the prefill makes the first token, "
            f"so give at least 2."
        )
    if not arguments.output.parent.is_dir():
        raise UserError(f"-o: there is no folder '{arguments.output.parent}'.")
    console, warnings = Console(), Console(stderr=True)
    for warning in environment_warnings(profile):
        warnings.print(f"warning: {warning}", style="yellow")
    for batch in arguments.batch_sizes:
        wanted = plan.Wanted(
            batch=batch,
            max_levels=arguments.max_levels,
            max_budget=arguments.max_draft_tokens,
            verifier=arguments.verifier,
            acceptance=arguments.acceptance,
            output_tokens=arguments.output_tokens,
        )
        planner = plan.Planner(profile, wanted)
        choice = planner.choose()
        console.print(choice_table(profile, choice))
        for name, option in losers(choice):
            why = plan.why_slower(profile, option, choice.best)
            console.print(f"{name}: {option.ms / choice.best.ms - 1:+.1%}, {why}", soft_wrap=True)
        path = arguments.output
        if len(arguments.batch_sizes) > 1:
            path = path.with_stem(f"{path.stem}-batch{batch}")
        if choice.best.cascade.levels:
            chosen = plan.cascade_file(profile, choice, arguments.profile)
            path.write_text(json.dumps(chosen, indent=2) + "\n")
            warnings.print(f"wrote {path}")
        else:
            warnings.print(
                f"No speculation is the fastest at batch size {batch}: no {path} was written."
            )
        if arguments.plot:
            from vllm_hsd.planner.plots import plot_plan

            for written in plot_plan(planner, choice, arguments.plot):
                warnings.print(f"wrote {written}")
    return 0


def losers(choice) -> list[tuple[str, object]]:
    """What was not chosen: the single draft and no speculation first, then by time."""
    listed = [("best single draft", choice.single), ("no speculation", choice.none)]
    return [(n, option) for n, option in (*listed, *choice.others) if option is not choice.best]


def choice_table(profile, choice) -> Table:
    """The chosen cascade and the losers, one row each."""
    from vllm_hsd.planner.plan import label

    wanted = choice.wanted
    table = Table(
        title=f"{profile.names[-1]}, batch size {wanted.batch}, temperature "
        f"{profile.sampling.temperature:g}, {wanted.verifier} verification"
    )
    for heading in ("", "cascade"):
        table.add_column(heading)
    for heading in ("ms/token", "tokens/call", "vs none", "vs single"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, option in [("chosen", choice.best), *losers(choice)]:
        table.add_row(
            name,
            label(profile, option.cascade),
            f"{option.ms:.3f}",
            f"{option.prediction.tokens_per_step:.2f}",
            f"{choice.none.ms / option.ms:.2f}x",
            f"{choice.single.ms / option.ms:.2f}x",
            style="bold" if option is choice.best else "",
        )
    return table


def rate_table(profile) -> Table:
    """Acceptance rates of all pairs, with the measured cost of one token where there is one."""
    table = Table(title="acceptance rates (1 - total variation)")
    table.add_column("")
    for name in profile.names:
        table.add_column(name, justify="right")
    if profile.costs:
        table.add_column("ms/forward", justify="right")
    for i, name in enumerate(profile.names):
        row = [f"{rate:.3f}" for rate in profile.rate_matrix()[i]]
        if profile.costs:
            row.append(f"{profile.costs.forward[i].at(1, 1):.3f}")
        table.add_row(name, *row)
    return table
