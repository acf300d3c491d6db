"""CPU: the verification kernels against those of vLLM's V2 sampler, in pairs.

Both are compiled for this CPU by `kernels.cpu_backend`, get the same logits, draft rows and tokens
and alternate in one process. The result is the ratio of the two times of a pair, in wall time and,
for shared machines, in CPU time. Tokens are compared with the reference before anything is timed.
"""

import statistics
import time

import torch

from benchmarks.common import RESULTS, options, write_csv
from benchmarks.gpu.kernel_times import check_case, samplers
from benchmarks.kernels.drafts import Drafts
from tests.support import vllm_sampler
from vllm_hsd.kernels import cpu_backend

DRAFT = 8
# Noise on the draft's logits that gives about three accepted tokens in four.
NOISE = 1.5
WARM_UP = 2
TEMPERATURES = 0.0, 1.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def paired(drafts: Drafts, v2: tuple, method: str, pairs: int) -> dict[str, float]:
    """Medians of both sides and quartiles of the ratio of each pair, in wall and in CPU time."""
    every = samplers(drafts, v2)
    sides = {"vllm": every[f"vLLM V2 {method}"], "ours": every[f"{method}, lse given"]}
    times: dict[tuple[str, str], list[float]] = {(n, c): [] for n in sides for c in CLOCKS}
    for i in range(pairs + WARM_UP):
        for name in list(sides) if i % 2 else list(sides)[::-1]:
            start = {clock: read() for clock, read in CLOCKS.items()}
            sides[name]()
            for clock, read in CLOCKS.items():
                times[name, clock].append(read() - start[clock])
    times = {key: seconds[WARM_UP:] for key, seconds in times.items()}
    result = {f"{name}_us": 1e6 * statistics.median(times[name, "wall"]) for name in sides}
    for clock in CLOCKS:
        ratios = [a / b for a, b in zip(times["ours", clock], times["vllm", clock], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        result |= {f"{clock}_ratio": middle, f"{clock}_q25": low, f"{clock}_q75": high}
    return result | {"pairs": pairs}


def main() -> None:
    parser = options(__doc__, RESULTS / "kernels")
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs for each case")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 49152, 152064])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cpu_backend.install()
    v2 = vllm_sampler.load_v2_sampler()
    rows = []
    for vocabulary in args.vocabularies:
        for batch in args.batches:
            for temperature in TEMPERATURES:
                drafts = Drafts.make(vocabulary, batch, DRAFT, temperature, noise=NOISE)
                check_case(drafts, 4)
                for method in ("block", "standard"):
                    case = {"vocabulary": vocabulary, "batch": batch, "temperature": temperature}
                    found = paired(drafts, v2, method, args.pairs)
                    rows.append(case | {"method": method, **found})
                    print(
                        f"V={vocabulary} batch={batch} T={temperature:g} {method}: "
                        f"vLLM {found['vllm_us']:.0f} us, ours {found['ours_us']:.0f} us, ratio "
                        f"{found['wall_ratio']:.2f} ({found['wall_q25']:.2f}.."
                        f"{found['wall_q75']:.2f}), CPU time {found['cpu_ratio']:.2f}",
                        flush=True,
                    )
    rows = [row | {"draft": DRAFT, "threads": args.threads} for row in rows]
    write_csv(args.output / "cpu_verify.csv", rows)
    print(f"wrote {args.output / 'cpu_verify.csv'}")


if __name__ == "__main__":
    main()
