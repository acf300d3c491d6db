"""Registers, spills and shared memory of every kernel, compiled without a GPU."""

import argparse
from pathlib import Path

import pandas as pd

from vllm_hsd.kernels.testing import builds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results"), help="directory of the CSV")
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90])
    args = parser.parse_args()
    rows = [
        {"kernel": name, "sm": capability, **builds.build(name, capability)._asdict()}
        for name in builds.VARIANTS
        for capability in args.capabilities
    ]
    table = pd.DataFrame(rows)
    print(table.to_string(index=False))
    args.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(args.out / "aot_usage.csv", index=False)
    print(f"wrote {args.out / 'aot_usage.csv'}")


if __name__ == "__main__":
    main()
