"""GPU: chain verification kernels against vLLM's V2 and V1 samplers, the torch path and a copy.

Every case is checked before it is timed: on the device against the reference, and again when
replayed from a CUDA graph. Times are medians of cold-cache runs (L2 is overwritten in between).
Calls that can be captured are timed as CUDA graphs. The floor is the time to read, at the copy
bandwidth measured here, the rows that any verifier must read once (see kernels/README.md). No run
on a GPU has been made yet.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.common import write_csv
from benchmarks.kernels.drafts import Drafts
from benchmarks.kernels.timing import NotTimed, capture, copy_bandwidth, spread_us
from benchmarks.kernels.vllm_v1 import load_v1
from benchmarks.plot import saved_figure
from vllm_hsd.kernels.testing import reference, vllm_sampler
from vllm_hsd.verify import verify_chain

NOISE = 1.5


def samplers(drafts: Drafts, v2, v1) -> dict[str, Callable[[], object]]:
    """The timed calls by name; each one verifies the whole batch."""
    choices: dict[str, Callable[[], object]] = {}
    for method in ("block", "standard"):
        for lse in (True, False):
            name = f"{method}, lse given" if lse else method
            choices[name] = lambda m=method, given=lse: drafts.ours(m, given)
    if v2 is not None:
        rejection_sample, apply_temperature = v2
        arguments = drafts.vllm_arguments()
        scaled = drafts.temperature[0].item() not in (0.0, 1.0)

        def stock(block: bool):
            logits = drafts.target
            if scaled:
                # As vLLM's sampler does where a temperature is neither 0 nor 1.
                logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
                apply_temperature(logits, arguments["expanded_idx_mapping"], drafts.temperature)
            return rejection_sample(logits, **arguments, use_block_verification=block)

        choices["vLLM V2 block"] = lambda: stock(True)
        choices["vLLM V2 standard"] = lambda: stock(False)
    if v1 is not None:
        choices["vLLM V1"] = v1(drafts)
    choices["torch"] = lambda: torch_path(drafts)
    return choices


def torch_path(drafts: Drafts) -> torch.Tensor:
    """Softmax and the package's verify_chain, from the same logits."""
    lengths = [drafts.n] * drafts.batch
    if drafts.temperature[0] == 0:
        return verify_chain(drafts.target, None, drafts.tokens, lengths, method="greedy").token_ids
    scale = 1 / drafts.temperature[0]
    p = (drafts.target.float() * scale).softmax(-1)
    q = (drafts.draft.float() * scale).softmax(-1)
    return verify_chain(p, q, drafts.tokens, lengths).token_ids


def check(temperature: float) -> None:
    """Kernels on the device against the reference, every request of a batch of short rows.

    Raises:
        NotTimed: they differ.
    """
    check_case(Drafts.make(5000, 64, 5, temperature, noise=NOISE, device="cuda"), 64)


def check_case(drafts: Drafts, count: int) -> None:
    """Tokens of the first `count` requests against the reference.

    Raises:
        NotTimed: more than one differs. A uniform within rounding distance of a boundary may fall
            on its other side.
    """
    n = drafts.n
    count = min(count, drafts.batch)
    for method in ("block", "standard"):
        expected = reference.verify_chain(
            drafts.target[: count * (n + 1)].cpu(),
            drafts.draft[: count * n].cpu(),
            drafts.tokens[: count * n].cpu(),
            torch.arange(count + 1) * n,
            drafts.temperature[:count].cpu(),
            drafts.seeds[:count].cpu(),
            torch.zeros(count, dtype=torch.int64),
            max_draft_tokens=n,
            method=method,
        ).token_ids
        for lse in (True, False):
            got = drafts.ours(method, lse).token_ids[:count].cpu()
            wrong = int((got != expected).any(1).sum())
            if wrong > 1:
                temperature = drafts.temperature[0].item()
                raise NotTimed(
                    f"{method}, T={temperature:g}, V={drafts.target.shape[1]}, n={n}: {wrong} of "
                    f"{count} requests differ from the reference; not timed."
                )


def measure(
    drafts: Drafts, v2, v1, bandwidth: float, repeats: int, flush, without: Sequence[str] = ()
) -> list[dict]:
    """A row for each sampler that is here, but for those named in `without`.

    Raises:
        NotTimed: a kernel's tokens are wrong, or differ when replayed.
    """
    check_case(drafts, 8)
    rows = []
    for name, call in samplers(drafts, v2, v1).items():
        if name in without:
            continue
        replay = capture(call, flush.device) if name not in ("torch", "vLLM V1") else None
        ours = name.startswith(("block", "standard"))
        if ours and replay is None:
            raise NotTimed(f"{name} could not be captured in a CUDA graph.")
        if ours and not replay().token_ids.equal(call().token_ids):
            raise NotTimed(f"{name}: a graph replay gives other tokens.")
        row = {"sampler": name, "graph": replay is not None, "floor_us": None}
        row["of_copy_bandwidth"] = None
        row |= spread_us(replay or call, repeats, flush)
        if ours:
            needed = drafts.needed_bytes(call().num_accepted, name.endswith("given"))
            row["floor_us"] = 1e6 * needed / bandwidth
            row["of_copy_bandwidth"] = row["floor_us"] / row["us"]
        rows.append(row)
    return rows


def plot(rows: list[dict], path: Path) -> None:
    panels = list(dict.fromkeys((row["vocabulary"], row["temperature"]) for row in rows))
    with saved_figure(path, 4 * len(panels), 4) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, (vocabulary, temperature) in zip(axes, panels, strict=True):
            panel = [
                row
                for row in rows
                if (row["vocabulary"], row["temperature"]) == (vocabulary, temperature)
            ]
            for name in dict.fromkeys(row["sampler"] for row in panel):
                line = [(row["batch"], row["us"]) for row in panel if row["sampler"] == name]
                axis.plot(*zip(*line, strict=True), marker="o", label=name)
            floor = [row for row in panel if row["sampler"] == "block, lse given"]
            axis.plot(
                [row["batch"] for row in floor],
                [row["floor_us"] for row in floor],
                "k--",
                label="floor, lse given",
            )
            axis.set(xscale="log", yscale="log", xlabel="batch", ylabel="us")
            axis.set_title(f"V={vocabulary}, T={temperature}")
        axes[0].legend(fontsize="small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("results"), help="directory of CSV and PNG"
    )
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32000, 128256, 152064])
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device.")
    torch.manual_seed(0)
    loaded = {}
    for name, load in (("vLLM V2", vllm_sampler.load_v2_sampler), ("vLLM V1", load_v1)):
        try:
            loaded[name] = load()
        except ImportError as error:
            print(f"{name} is left out: {error}")
            loaded[name] = None
    for temperature in args.temperatures:
        check(temperature)
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    bandwidth = copy_bandwidth(2**30, args.repeats, flush)
    device = torch.cuda.get_device_name()
    print(f"{device}: copy {bandwidth / 1e12:.2f} TB/s (read and written)", flush=True)
    rows = []
    for vocabulary in args.vocabularies:
        for n in args.drafts:
            for batch in args.batches:
                for temperature in args.temperatures:
                    drafts = Drafts.make(
                        vocabulary, batch, n, temperature, noise=NOISE, device="cuda"
                    )
                    case = {
                        "vocabulary": vocabulary,
                        "draft": n,
                        "batch": batch,
                        "temperature": temperature,
                    }
                    results = measure(
                        drafts, loaded["vLLM V2"], loaded["vLLM V1"], bandwidth, args.repeats, flush
                    )
                    rows += [{**case, **result} for result in results]
                    shown = ", ".join(f"{r['sampler']} {r['us']:.0f}" for r in results)
                    print(f"V={vocabulary} n={n} B={batch} T={temperature} us: {shown}", flush=True)
                    del drafts
    rows = [row | {"device": device, "copy_bytes_per_s": bandwidth} for row in rows]
    write_csv(args.output / "chain_verify_gpu.csv", rows)
    shown = args.drafts[len(args.drafts) // 2]
    plot([row for row in rows if row["draft"] == shown], args.output / "chain_verify_gpu.png")
    print(f"wrote {args.output / 'chain_verify_gpu.csv'} and .png")


if __name__ == "__main__":
    main()
