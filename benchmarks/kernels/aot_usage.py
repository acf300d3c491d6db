"""Registers, stack and shared memory of every kernel that serving launches, without a GPU."""

from collections import defaultdict

import triton

from benchmarks.common import RESULTS, options, write_csv
from tests.support import kernel_builds as builds
from tests.support import launch_cases


def main() -> None:
    parser = options(__doc__, RESULTS / "kernels")
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 90, 100])
    args = parser.parse_args()
    rows = []
    for capability in args.capabilities:
        with builds.compile_launches(capability) as compiled:
            launch_cases.launch(launch_cases.ALL)
        for name, message in compiled.failed:
            print(f"{name} sm_{capability} failed: {message}")
        usages = defaultdict(list)
        for build in compiled.built.values():
            usages[build.name].append(builds.usage(build))
        for name, found in sorted(usages.items()):
            columns = dict(zip(builds.Usage._fields, zip(*found, strict=True), strict=True))
            # The worst of all specializations; accesses of one entry are right where a vocabulary
            # is not a multiple of 16.
            worst = {key: max(values) for key, values in columns.items()}
            worst["spilling"] = sum(stack > 0 for stack in columns["stack"])
            row = {"kernel": name, "sm": capability, "triton": triton.__version__}
            rows.append({**row, "specializations": len(found), **worst})
            print(rows[-1], flush=True)
    write_csv(args.output / "aot_usage.csv", rows)
    print(f"wrote {args.output / 'aot_usage.csv'}")


if __name__ == "__main__":
    main()
