"""`vllm-hsd profile` and `vllm-hsd plan`."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_hsd.checked_files import write_json
from vllm_hsd.config.cascade_config import MAX_LEVELS, CascadeConfig
from vllm_hsd.config.sizes import MAX_BATCH_SIZE
from vllm_hsd.errors import UserError, quoted
from vllm_hsd.levels.base import LONGEST_DRAFT
from vllm_hsd.tools import system
from vllm_hsd.tools.cli.options import engine_args, integers
from vllm_hsd.tools.planner.predict import Prediction, Selection
from vllm_hsd.tools.planner.profile import (
    Candidate,
    Profile,
    Sampling,
    environment_warnings,
    load_profile,
    measurement_warnings,
    partial_directory,
    tables_file,
)
from vllm_hsd.tools.planner.search import Constraints, Plan, Search
from vllm_hsd.tools.planner.task import Task, candidates

# Relative spread of equal steps above which the times are reported as unreliable.
NOISY = 0.15


def add_parsers(subparsers: Any) -> None:
    """Add both commands; each sets `run`, a function of the parsed arguments -> exit status."""
    profile = subparsers.add_parser(
        "profile",
        help="measure latencies and acceptance of candidate drafters on this machine",
        epilog="Several of --ngram, --suffix and --bigram are measured each alone and together, as "
        "the sources of\none level; an EAGLE-3 head is measured without them.\n\n"
        "example:\n"
        "  vllm-hsd profile --target Qwen/Qwen3-8B --models Qwen/Qwen3-0.6B --ngram \\\n"
        "    --prompts prompts.jsonl --batch-sizes 1,8",
    )
    add = profile.add_argument
    add("--target", required=True, metavar="MODEL", help="path or hub name of the target")
    add("--models", nargs="*", default=[], metavar="MODEL", help="drafter models")
    add(
        "--exits", type=integers, default=[], metavar="N[,N...]",
        help="the target's first N layers as drafters",
    )  # fmt: skip
    add(
        "--exit-heads", nargs="*", default=[], metavar="DIR",
        help="directories written by `vllm-hsd build exit-heads`",
    )  # fmt: skip
    add(
        "--ngram", nargs="?", type=int, const=4, default=None, metavar="MAX",
        help="prompt lookup of the last 1 to MAX tokens (4 if no MAX is given)",
    )  # fmt: skip
    add(
        "--suffix", nargs="?", const="", default=None, metavar="FILE",
        help="suffix lookup in the request's text and a store written by `vllm-hsd build store`",
    )  # fmt: skip
    add(
        "--bigram", default=None, metavar="FILE",
        help="lookup of the likeliest token after the last one in such a store",
    )  # fmt: skip
    add("--bigram-model", default=None, metavar="FILE", help="which draws that token")
    add("--eagle3", default=None, metavar="DIR", help="an EAGLE-3 head of the target")
    add(
        "--prompts", type=Path, default=None, metavar="FILE|SET",
        help="JSON lines (.jsonl) with 'turns', 'messages' or 'prompt', text with blank lines "
        "between, or a public set (see bench); without it, the target writes texts of its own",
    )  # fmt: skip
    add("--num-prompts", type=int, default=64, metavar="N", help="most prompts to use")
    add("--temperature", type=float, default=1.0, help="temperature of the requests")
    add("--top-p", type=float, default=1.0, help="top-p of the requests")
    add("--max-draft-tokens", type=int, default=16, metavar="N", help="longest draft to measure")
    add(
        "--batch-sizes", type=integers, default="1", metavar="N[,N...]",
        help="requests per step to time",
    )  # fmt: skip
    add(
        "--engine-args", default="{}", metavar="JSON",
        help="further arguments of vllm.LLM while timing",
    )  # fmt: skip
    add("--seed", type=int, default=0, help="seed of everything drawn")
    add("--device", default=None, help="device of the acceptance measurement (a GPU if present)")
    add(
        "--skip-timing", action="store_true",
        help="measure acceptance only; `plan` needs the latencies too",
    )  # fmt: skip
    add(
        "-o", "--output", type=Path, default=Path("profile.json"),
        help="JSON file to write; its tables go next to it",
    )  # fmt: skip
    profile.set_defaults(run=profile_command)

    plan = subparsers.add_parser(
        "plan",
        help="choose the cascade for a profile",
        epilog="example:\n  vllm-hsd plan profile.json --batch-sizes 1,8",
    )
    add = plan.add_argument
    add("profile", type=Path, help="file written by `vllm-hsd profile`")
    add("--max-levels", type=int, default=None, metavar="N", help="most drafters (any number)")
    add(
        "--max-draft-tokens", type=int, default=None, metavar="N",
        help="longest draft of any level (as long as the profile covers)",
    )  # fmt: skip
    add(
        "--batch-sizes", type=integers, default="1", metavar="N[,N...]",
        help="requests per step; one cascade is chosen for each",
    )  # fmt: skip
    add("--verifier", choices=("block", "standard"), default="block", help="at every level")
    add("-o", "--output", type=Path, default=Path("cascade.json"), help="file to write")
    plan.set_defaults(run=plan_command)


def profile_command(arguments: argparse.Namespace) -> int:
    """Measure and write the profile; an interrupted run is resumed by the same command."""
    _check_profile_arguments(arguments)
    given = engine_args(
        arguments.engine_args,
        arguments.batch_sizes,
        model="use --target",
        speculative_config="the target runs without",
    )
    from vllm_hsd.cascade.exit_head import exit_head_header
    from vllm_hsd.tools.planner.measure import measure_profile

    console = Console(stderr=True)
    task = Task(
        target=arguments.target,
        candidates=candidates(
            models=arguments.models,
            exits=arguments.exits,
            exit_heads=[(path, exit_head_header(path).layer) for path in arguments.exit_heads],
            ngram=arguments.ngram,
            suffix=arguments.suffix,
            bigram=arguments.bigram,
            bigram_model=arguments.bigram_model,
            eagle3=arguments.eagle3,
        ),
        sampling=Sampling(temperature=arguments.temperature, top_p=arguments.top_p),
        max_draft_tokens=arguments.max_draft_tokens,
        engine_args=given,
        batch_sizes=sorted(set(arguments.batch_sizes)),
        seed=arguments.seed,
    )
    try:
        profile = measure_profile(
            task,
            arguments.output,
            console,
            prompts_file=arguments.prompts,
            max_prompts=arguments.num_prompts,
            device=arguments.device,
            with_latencies=not arguments.skip_timing,
        )
    except KeyboardInterrupt:
        console.print("Interrupted. Rerun the same command to resume.")
        return 130
    Console().print(rate_table(profile))
    if profile.latencies and (spread := profile.latencies.relative_spread()) > NOISY:
        console.print(
            f"warning: equal steps took times that differ by +-{spread:.0%}, so predictions are "
            f"no better; profile again when nothing else uses this machine.",
            style="yellow",
        )
    for warning in measurement_warnings(profile):
        console.print(f"warning: {warning}", style="yellow")
    written = f"{arguments.output} and {tables_file(arguments.output)}"
    console.print(f"wrote {written}", soft_wrap=True)
    return 0


def _check_profile_arguments(arguments: argparse.Namespace) -> None:
    longest, ngram = arguments.max_draft_tokens, arguments.ngram
    if not 1 <= longest <= LONGEST_DRAFT:
        raise UserError(f"--max-draft-tokens is {longest}: give 1 to {LONGEST_DRAFT}.")
    if arguments.num_prompts < 1:
        raise UserError(f"--num-prompts is {arguments.num_prompts}: give at least 1.")
    if min(arguments.batch_sizes) < 1:
        raise UserError("--batch-sizes must be at least 1.")
    if min(arguments.exits, default=1) < 1:
        raise UserError(f"--exits has {min(arguments.exits)}: give numbers of layers from 1 on.")
    if not all(arguments.models):
        raise UserError("--models has an empty name: give paths or names of models.")
    if arguments.seed < 0:
        raise UserError(f"--seed is {arguments.seed}: it must be at least 0.")
    if not 0 <= arguments.temperature < float("inf"):
        raise UserError(f"--temperature is {arguments.temperature:g}: it must be at least 0.")
    if not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p is {arguments.top_p:g}: it must be above 0 and at most 1.")
    if ngram is not None and not 1 <= ngram <= 1024:
        raise UserError(f"--ngram is {ngram}: give the longest match, 1 to 1024 tokens.")
    output, tables = arguments.output, tables_file(arguments.output)
    if output.suffix != ".json":
        raise UserError(
            "--output must end in .json: its tables go to a .safetensors file next to it."
        )
    stores = arguments.suffix, arguments.bigram, arguments.bigram_model, arguments.prompts
    read = {Path(each).resolve() for each in stores if each}
    # Without a profile, or one that is being measured, tables of that name are another file.
    ours = output.exists() or partial_directory(output).exists()
    for path in (output, tables):
        if path.resolve() in read or (path.exists() and not ours):
            raise UserError(f"--output would write over {quoted(str(path))}: name another file.")
    # One engine has them all as levels, next to the lookups, a bigram model and a filler.
    hosted = [*arguments.models, *arguments.exits, *arguments.exit_heads]
    if len(hosted) > MAX_LEVELS - 3:
        raise UserError(
            f"{len(hosted)} models, exits and heads are too many for one engine: give at most "
            f"{MAX_LEVELS - 3}."
        )
    _check_directory(output)


def _check_directory(output: Path) -> None:
    if not output.parent.is_dir():
        raise UserError(f"--output: there is no directory {quoted(str(output.parent))}.")
    if output.is_dir():
        raise UserError(f"--output: {quoted(str(output))} is a directory: name a file.")


def plan_command(arguments: argparse.Namespace) -> int:
    """Choose a cascade per batch size, explain it, write it, and print how to serve with it."""
    profile = load_profile(arguments.profile)
    _check_directory(arguments.output)
    read = {path.resolve() for path in (arguments.profile, tables_file(arguments.profile))}
    paths = {batch: arguments.output for batch in arguments.batch_sizes}
    if len(paths) > 1:
        stem = arguments.output.stem
        paths = {batch: arguments.output.with_stem(f"{stem}-batch{batch}") for batch in paths}
    if not read.isdisjoint(path.resolve() for path in paths.values()):
        raise UserError("--output would write over the profile: name another file.")
    console, messages = Console(), Console(stderr=True, soft_wrap=True)
    for warning in (*environment_warnings(profile), *measurement_warnings(profile)):
        messages.print(f"warning: {warning}", style="yellow")
    planned = {}
    for batch in paths:
        constraints = Constraints(
            batch=batch,
            max_levels=arguments.max_levels,
            max_draft_tokens=arguments.max_draft_tokens,
            verifier=arguments.verifier,
        )
        search = Search(profile, constraints)
        planned[batch] = search, search.choose()
        _check_verifier(profile, planned[batch][1])
    commands = []
    for batch, (search, choice) in planned.items():
        console.print(choice_table(profile, choice))
        for name, option in losers(choice):
            why = why_slower(profile, option, choice.best)
            longer = option.ms_per_token / choice.best.ms_per_token - 1
            console.print(f"{name}: {longer:+.1%}, {why}", soft_wrap=True)
        parts = (f"{part} {seconds:.2f}" for part, seconds in search.seconds.items())
        messages.print(f"planned in {sum(search.seconds.values()):.2f} s ({', '.join(parts)})")
        path = paths[batch]
        if len(paths) > 1:
            commands.append(f"# batch size {batch}")
        commands.append(serve_command(profile, choice))
        if choice.best.selection.levels:
            write_json(path, cascade_file(profile, choice, arguments.profile))
            messages.print(f"wrote {path}")
            only, *others = (profile.candidates[i] for i in choice.best.selection.levels)
            if only.is_lookup and not others:
                messages.print(
                    "A profile knows one draft at a time: compare this by `vllm-hsd bench` with "
                    f"several in one pass, {json.dumps(several_drafts(only))}"
                )
        else:
            done = f"removed the older {path}" if path.exists() else f"did not write {path}"
            path.unlink(missing_ok=True)
            messages.print(f"No speculation is the fastest at batch size {batch}: {done}.")
    print("\n".join(commands))
    return 0


def _check_verifier(profile: Profile, choice: Plan) -> None:
    """vLLM's own drafter has no `verifier`."""
    if not choice.best.selection.levels:
        return
    config = CascadeConfig.parse(cascade_keys(profile, choice))
    if config.verifier == "standard" and config.is_stock:
        raise UserError(
            f"--verifier standard: {label(profile, choice.best.selection)} is the fastest, which "
            "vLLM's own drafter serves, by block verification: plan with --verifier block."
        )


def several_drafts(lookup: Candidate) -> dict[str, Any]:
    """A level of the same lookups of which up to four drafts are verified together."""
    keys = lookup.keys()
    return {**(keys if "sources" in keys else {"sources": [keys]}), "branches": 4}


def cascade_keys(profile: Profile, choice: Plan) -> dict[str, Any]:
    """The chosen cascade as keys of a speculative config.

    The last level has no draft length of its own: it fills num_speculative_tokens.
    """
    selection = choice.best.selection
    levels = [profile.candidates[level].keys() for level in selection.levels]
    for level, length in zip(levels[:-1], selection.draft_lengths, strict=False):
        level["num_tokens"] = length
    keys = {
        "num_speculative_tokens": selection.draft_lengths[-1],
        "levels": levels,
        "verifier": choice.constraints.verifier,
    }
    if choice.constraints.batch > MAX_BATCH_SIZE and not CascadeConfig.parse(keys).is_stock:
        keys["disable_by_batch_size"] = choice.constraints.batch
    return keys


def cascade_file(profile: Profile, choice: Plan, source: Path) -> dict[str, Any]:
    """What the plugin reads from `{"method": "hsd", "cascade": "cascade.json"}`."""
    return {
        "schema": 1,
        **cascade_keys(profile, choice),
        "planned_for": {
            "target": profile.target,
            "profile": str(source),
            "batch_size": choice.constraints.batch,
            "temperature": profile.sampling.temperature,
            "top_p": profile.sampling.top_p,
            "ms_per_token": round(choice.best.ms_per_token, 4),
            "tokens_per_step": round(choice.best.tokens_per_step, 3),
            "speedup_over_none": round(choice.none.ms_per_token / choice.best.ms_per_token, 3),
            "speedup_over_single": round(choice.single.ms_per_token / choice.best.ms_per_token, 3),
            "machine": profile.machine,
            "versions": profile.versions,
        },
    }


def serve_command(profile: Profile, choice: Plan) -> str:
    """The shell command that serves the target with what was chosen."""
    command = system.serve_command(profile.target)
    if profile.latencies and profile.latencies.dtype != "auto":
        command += ["--dtype", profile.latencies.dtype]
    if profile.latencies:
        # Times are those of a CPU.
        command += ["--gpu-memory-utilization", f"{system.free_memory():.2f}"]
    if choice.best.selection.levels:
        config = {"method": "hsd", **cascade_keys(profile, choice)}
        command += ["--speculative-config", json.dumps(config)]
    return shlex.join(command)


def label(profile: Profile, selection: Selection) -> str:
    """One line such as `small 3 < mid 8 < target`."""
    steps = [
        f"{profile.candidates[level].name} {length}"
        for level, length in zip(selection.levels, selection.draft_lengths, strict=True)
    ]
    return " < ".join([*steps, profile.names[-1]])


def why_slower(profile: Profile, option: Prediction, best: Prediction) -> str:
    """What costs an option more time per token than the best one."""
    times: dict[str, list[float]] = {}
    for column, prediction in enumerate((option, best)):
        models = [*prediction.selection.levels, len(profile.candidates)]
        for model, ms in zip(models, prediction.level_ms, strict=True):
            times.setdefault(profile.names[model], [0.0, 0.0])[column] += (
                ms * prediction.ms_per_token / prediction.ms_per_step
            )
    name, (here, there) = max(times.items(), key=lambda item: item[1][0] - item[1][1])
    text = f"{name} takes {here:.3g} ms/token (chosen: {there:.3g})"
    emitted = option.tokens_per_step, best.tokens_per_step
    if name == profile.names[-1] and emitted[0] < emitted[1]:
        text += f" and emits {emitted[0]:.2f} tokens per step (chosen: {emitted[1]:.2f})"
    return text


def losers(choice: Plan) -> list[tuple[str, Prediction]]:
    """What was not chosen: the single drafter and no speculation first, then by time."""
    listed = [("best single drafter", choice.single), ("no speculation", choice.none)]
    return [(n, option) for n, option in (*listed, *choice.others) if option is not choice.best]


def choice_table(profile: Profile, choice: Plan) -> Table:
    """The chosen cascade and the losers, one row each."""
    constraints = choice.constraints
    table = Table(
        title=f"{profile.names[-1]}, batch size {constraints.batch}, temperature "
        f"{profile.sampling.temperature:g}, {constraints.verifier} verification"
    )
    for heading in ("", "cascade"):
        table.add_column(heading)
    for heading in ("ms/token", "tokens/step", "speed-up", "vs best single"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, option in [("chosen", choice.best), *losers(choice)]:
        table.add_row(
            name,
            label(profile, option.selection),
            f"{option.ms_per_token:.3f}",
            f"{option.tokens_per_step:.2f}",
            f"{choice.none.ms_per_token / option.ms_per_token:.2f}x",
            f"{choice.single.ms_per_token / option.ms_per_token:.2f}x",
            style="bold" if option is choice.best else "",
        )
    return table


def rate_table(profile: Profile) -> Table:
    """Acceptance rates of all pairs, with the latency of one token where it was measured.

    A lookup has no distribution, so it verifies nothing: its row says how often the target accepts
    its first token, offered or not.
    """
    table = Table(title="acceptance rates (1 - total variation)")
    table.add_column("")
    verifying = [i for i in range(len(profile.names)) if i not in profile.lookups]
    for i in verifying:
        table.add_column(profile.names[i], justify="right")
    if profile.latencies:
        batch = min(profile.latencies.batch_sizes(), default=1)
        table.add_column(f"ms/forward (batch {batch})", justify="right")
    rates = profile.rate_matrix()
    for i in profile.lookups:
        rates[i, -1] = profile.acceptance("block").survival[-1, i, 1, 0, 1]
    for i, name in enumerate(profile.names):
        row = ["" if rate != rate else f"{rate:.3f}" for rate in rates[i, verifying]]
        if profile.latencies:
            row.append(f"{profile.latencies.forward[i].at(batch, 1):.3f}")
        table.add_row(name, *row)
    return table
