"""Proof on a GPU: correctness, exactness and times of what was built without one, item by item.

Needs one GPU, torch and Triton, and no network; items that need vLLM say so where it is missing.
What has passed with this code on this device is not run again, so a run that was ended goes on
where it was. `docs/gpu-proof.md` tells how.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.common import RESULTS
from benchmarks.gpu import report, runner
from benchmarks.gpu.items import ITEMS, Setting
from benchmarks.gpu.results import Result


def main() -> int:
    """0 where nothing failed and nothing is left, 1 for failures, 2 where time ran out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu")
    parser.add_argument(
        "--items", nargs="+", choices=[item.name for item in ITEMS], help="only these"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start nothing that may take longer"
    )
    parser.add_argument("--again", action="store_true", help="also what has passed")
    args = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not interpreted:
        print("No CUDA device was found: run this on a host with a GPU.", file=sys.stderr)
        return 1
    setting = Setting("cpu" if interpreted else "cuda", args.output.absolute())
    chosen = [item for item in ITEMS if not args.items or item.name in args.items]

    def on_result(result: Result) -> None:
        item = next(item for item in ITEMS if item.name == result.name)
        report.write_tables(setting.output, item, result)
        report.write(setting.output, ITEMS)
        print(f"{result.name}: {result.verdict} ({result.seconds:.0f} s) {result.reason}")
        for line in result.lines:
            print(f"  {line}")
        for line in result.left_out:
            print(f"  left out: {line}")
        sys.stdout.flush()

    left = runner.run(chosen, setting, seconds=args.seconds, again=args.again, on_result=on_result)
    print(report.write(setting.output, ITEMS, left))
    print(f"Report: {setting.output / 'report.md'}")
    results = [Result.load(setting.output, item) for item in chosen]
    failed = [r.name for r in results if r is not None and r.verdict == "failed"]
    unable = [r.name for r in results if r is not None and r.verdict == "could not run"]
    for label, names in (
        ("Failed", failed),
        ("Could not run", unable),
        ("Left for another run", [item.name for item in left]),
    ):
        if names:
            print(f"{label}: {', '.join(names)}.")
    return 1 if failed else 2 if left else 0


if __name__ == "__main__":
    sys.exit(main())
