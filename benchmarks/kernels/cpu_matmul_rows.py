"""Time of vLLM's matrix product on a CPU by the number of rows, one for each token of a step.

    python -m benchmarks.kernels.cpu_matmul_rows     # or `make bench-cpu-matmul`

A step of the target multiplies as many rows as it verifies tokens. The kernels that oneDNN chooses
are not equally good for all numbers: where one row takes longer than three, a step that verifies
drafts is faster than a step without any, and speed-ups exceed the tokens per step. Processor time
of one thread; numbers of rows take turns.
"""

import statistics
import time

import torch
from vllm import _custom_ops as ops

from benchmarks.common import RESULTS, options, write_csv
from vllm_hsd.errors import brief

# Of SmolLM2 zero-padded to 800 M parameters: MLP up, down, and output head.
SHAPES = ((576, 14_000), (14_000, 576), (576, 49_152))
ROWS = (1, 2, 3, 4, 6, 7, 8, 9, 12, 16, 24, 32)
# Bytes of weights that take turns, more than caches hold.
WEIGHTS = 160 << 20


def seconds_by_rows(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> dict[int, float]:
    """Median processor time of a product of [n, k] by [k, m] weights, by n.

    Raises:
        RuntimeError: oneDNN has no such product for this CPU, as of bfloat16 without AVX-512.
    """
    k, m = shape
    count = max(WEIGHTS // (k * m * dtype.itemsize), 1)
    weights = [torch.randn(m, k, dtype=dtype) for _ in range(count)]
    handlers = [ops.create_onednn_mm(weight.t(), 32) for weight in weights]
    found: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(rounds):
        for rows, times in found.items():
            inputs = torch.randn(rows, k, dtype=dtype)
            began = time.thread_time()
            for handler in handlers:
                ops.onednn_mm(handler, inputs, None)
            times.append((time.thread_time() - began) / count)
    return {rows: statistics.median(times) for rows, times in found.items()}


def main() -> None:
    parser = options(__doc__, RESULTS / "kernels")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    table = []
    for dtype in ("bfloat16", "float32"):
        for shape in SHAPES:
            try:
                times = seconds_by_rows(shape, getattr(torch, dtype), chosen.rounds)
            except RuntimeError as error:
                print(f"{dtype} is left out: oneDNN has no product of it here ({brief(error)}).")
                break
            ratios = {f"rows_{rows}": seconds / times[1] for rows, seconds in times.items()}
            table.append({"dtype": dtype, "weight": "x".join(map(str, shape))} | ratios)
            table[-1]["ms_1"] = 1e3 * times[1]
            print(*(f"{v:.2f}" if isinstance(v, float) else v for v in table[-1].values()))
    write_csv(chosen.output / "cpu_matmul_rows.csv", table)


if __name__ == "__main__":
    main()
