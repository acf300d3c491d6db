"""Registers, spills and shared memory of every kernel, compiled without a GPU."""

import argparse
from pathlib import Path

from benchmarks.common import write_csv
from vllm_hsd.kernels.testing import builds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results"), help="directory of the CSV")
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100])
    args = parser.parse_args()
    rows = []
    for name in builds.VARIANTS:
        for capability in args.capabilities:
            usage = builds.build(name, capability)
            rows.append({"kernel": name, "sm": capability, **usage._asdict()})
            print(f"{name:22s} sm_{capability} {usage}", flush=True)
    write_csv(args.output / "aot_usage.csv", rows)
    print(f"wrote {args.output / 'aot_usage.csv'}")


if __name__ == "__main__":
    main()
