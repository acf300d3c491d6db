"""Run all benchmarks one after another; each writes CSV and PNG into results/.

    python benchmarks/run_all.py        # or `make bench`; an hour or two

What each one printed is in results/logs/. Ends with what ran, what failed, and what could not run
on this machine; the exit status is 1 if one failed.
"""

import argparse
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parent
REPOSITORY = BENCHMARKS.parent
RESULTS = REPOSITORY / "results"


@dataclass(frozen=True)
class Benchmark:
    """A script below benchmarks/ (or a module), its arguments, and whether it needs a GPU."""

    script: str
    arguments: tuple[str, ...] = ()
    needs_gpu: bool = False

    @property
    def name(self) -> str:
        return self.script.removesuffix(".py").replace("/", "-")

    @property
    def command(self) -> list[str]:
        start = [str(BENCHMARKS / self.script)]
        if not self.script.endswith(".py"):
            start = ["-m", "vllm_hsd.cli.main", self.script]
        return [sys.executable, *start, *self.arguments]


ALL = (
    Benchmark("toy_models.py", ("--out", "results/toy_models")),
    Benchmark("paper_tables/gsp_tables.py", ("--output", "results/paper_tables")),
    Benchmark("kernels/aot_usage.py", ("--out", "results/kernels")),
    Benchmark("kernels/count_bytes.py", ("--out", "results/kernels")),
    Benchmark("kernels/bench_cpu_verify.py", ("--out", "results/kernels")),
    Benchmark("kernels/bench_chain_verify.py", ("--out", "results/kernels"), needs_gpu=True),
    Benchmark("planner/check_predictions.py", ("--output", "results/planner")),
    Benchmark("ablations/run.py", ("--out", "results/ablations")),
    Benchmark("end_to_end/profile_step.py"),
    Benchmark("end_to_end/batch_sizes.py"),
    Benchmark("demo"),
)


def run(benchmark: Benchmark) -> str:
    """Run one and say in a few words how it went."""
    if benchmark.needs_gpu and not torch.cuda.is_available():
        return "not run: needs a GPU, and there is none here"
    log = RESULTS / "logs" / f"{benchmark.name}.log"
    began = time.monotonic()
    with log.open("w") as stream:
        status = subprocess.run(
            benchmark.command, cwd=REPOSITORY, stdout=stream, stderr=subprocess.STDOUT
        ).returncode
    took = f"{time.monotonic() - began:.0f} s"
    return f"ran in {took}" if status == 0 else f"FAILED with status {status} after {took}: {log}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    (RESULTS / "logs").mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for benchmark in ALL:
        print(f"{benchmark.name} ...", flush=True)
        outcomes[benchmark.name] = run(benchmark)
        print(f"{benchmark.name}: {outcomes[benchmark.name]}", flush=True)
    print(f"\nTables and figures are below {RESULTS}.")
    for name, outcome in outcomes.items():
        print(f"{name:32} {outcome}")
    raise SystemExit(any(outcome.startswith("FAILED") for outcome in outcomes.values()))


if __name__ == "__main__":
    main()
