"""Several drafts verified together beside each source alone, the choice between them, and vLLM's.

    python -m benchmarks.studies.branches --prompts DIR [--padded 800e6]

With `--padded` the target is SmolLM2 zero-padded to so many parameters: its text and acceptance at
the cost of a larger model, beside which a head costs little. Goes on where it was stopped.
"""

import os
from typing import Any

from benchmarks import sweep
from benchmarks.common import RESULTS
from benchmarks.models.smollm2 import zero_padded
from benchmarks.studies.configs import EAGLE3, SUFFIX, fixed, missing, vllms_own
from benchmarks.sweep import Group
from vllm_hsd.cli.options import integers, numbers


def group(name: str, rows: list[int], temperatures: list[float]) -> Group:
    """vLLM's suffix lookup, ours, the head, both by choice, and both together by number of rows."""
    stock = vllms_own()["vLLM's suffix"]
    configs: dict[str, dict[str, Any]] = {
        "vLLM's suffix": stock,
        "suffix": fixed(SUFFIX, adaptive=True),
        "head": fixed(EAGLE3, length=3, adaptive=True),
    }
    for most in rows:
        level = {"sources": [SUFFIX, EAGLE3], "branches": most}
        configs[f"sources, {most} rows"] = fixed(level, adaptive=True)
    return Group(name, configs, temperatures)


def main() -> int:
    parser = sweep.options(__doc__, RESULTS / "branches", sets=True)
    parser.add_argument("--padded", type=float, help="parameters of a zero-padded target")
    parser.add_argument("--rows", type=integers, default=[1, 2, 4])
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 1.0])
    options = parser.parse_args()
    if wanting := missing():
        print(*wanting, sep="\n")
        return 1
    name = "SmolLM2"
    if options.padded:
        name = f"SmolLM2, zero-padded to {options.padded / 1e9:g} B"
        options.model = os.path.relpath(zero_padded(options.padded))
    table = sweep.Table(options.output / "branches.csv")
    prompts, sets = sweep.read_sets(options.prompts, options.num_prompts)
    cells = [group(name, options.rows, options.temperatures)]
    faults = sweep.fill(table, cells, options, prompts, sets)
    for measure in ("tokens_per_step", "speedup"):
        print(*sweep.means(table.rows, measure, "temperature"), sep="\n")
    print(f"\nWritten: {table.path}", *faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
