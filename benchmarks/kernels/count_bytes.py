"""Bytes and launches per verification, ours and vLLM's V2, counted by Triton's interpreter.

Counts every unmasked lane that a kernel loads or stores (a host-side cast or copy is added as what
it reads and writes), per request and vocabulary entry. Needs no GPU.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"


import torch

from benchmarks.common import RESULTS, options, write_csv
from benchmarks.kernels.drafts import Drafts
from tests.support import vllm_sampler
from tests.support.interpreter import count_bytes, repair

METHODS = {"block": True, "standard": False}


# Of the case "filtered", as serving defaults set them.
TOP_K, TOP_P = 20, 0.9


def count_ours(drafts: Drafts, method: str, lse: bool, filtered: bool = False) -> dict[str, object]:
    with count_bytes() as counts:
        result = drafts.filtered(method, TOP_K, TOP_P) if filtered else drafts.ours(method, lse)
    accepted = result.num_accepted
    return {**_per_entry(counts, drafts), **_needed(drafts, accepted, lse), **_mean(accepted)}


def count_vllm(drafts: Drafts, method: str, sampler) -> dict[str, object]:
    rejection_sample, apply_temperature, _ = sampler
    arguments = drafts.vllm_arguments
    logits = drafts.target
    with count_bytes() as counts:
        if drafts.temperature[0] not in (0.0, 1.0):
            # apply_sampling_params copies the logits to float32, then scales them in place.
            logits = logits.float()
            counts["loaded"] += drafts.target.nbytes
            counts["stored"] += logits.nbytes
            counts["launches"] += 1
            apply_temperature(logits, arguments["expanded_idx_mapping"], drafts.temperature)
        _, sampled = rejection_sample(logits, **arguments, use_block_verification=METHODS[method])
    accepted = sampled - 1
    return {**_per_entry(counts, drafts), **_needed(drafts, accepted, False), **_mean(accepted)}


def _per_entry(counts, drafts: Drafts) -> dict[str, float]:
    entries = drafts.batch * drafts.target.shape[1]
    return {
        "launches": counts["launches"],
        "loaded": counts["loaded"] / entries,
        "stored": counts["stored"] / entries,
        "bytes": (counts["loaded"] + counts["stored"]) / entries,
    }


def _needed(drafts: Drafts, accepted: torch.Tensor, lse: bool) -> dict[str, float]:
    entries = drafts.batch * drafts.target.shape[1]
    return {"needed": drafts.needed_bytes(accepted, lse) / entries}


def _mean(accepted: torch.Tensor) -> dict[str, float]:
    return {"accepted": float(accepted.float().mean())}


def main() -> None:
    parser = options(__doc__, RESULTS / "kernels")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draft", type=int, default=5, help="draft tokens per request")
    parser.add_argument("--noise", type=float, nargs="+", default=[0.5, 1.5, 3.0])
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.7])
    args = parser.parse_args()
    repair()
    torch.manual_seed(0)
    try:
        sampler = vllm_sampler.load_v2_sampler()
    except ImportError as error:
        print(f"vLLM's sampler is left out: {error}.")
        sampler = None
    rows = []
    for temperature in args.temperature:
        for noise in args.noise:
            drafts = Drafts.make(args.vocabulary, args.batch, args.draft, temperature, noise=noise)
            case = {"temperature": temperature, "noise": noise, "overlap": drafts.overlap()}
            for method in METHODS:
                counted = {
                    "ours, lse given": count_ours(drafts, method, True),
                    "ours": count_ours(drafts, method, False),
                    "ours, lse given, top-k and top-p": count_ours(drafts, method, True, True),
                }
                if sampler is not None:
                    counted["vLLM V2"] = count_vllm(drafts, method, sampler)
                for name, counts in counted.items():
                    rows.append({**case, "sampler": name, "method": method, **counts})
                    print(
                        f"T={temperature} overlap {case['overlap']:.2f} {method} {name}: "
                        f"{counts['bytes']:.2f} bytes, {counts['launches']} launches",
                        flush=True,
                    )
    shape = {
        "vocabulary": args.vocabulary,
        "batch": args.batch,
        "draft": args.draft,
        "dtype": "bfloat16",
    }
    write_csv(args.output / "count_bytes.csv", [row | shape for row in rows])
    print(f"wrote {args.output / 'count_bytes.csv'}")


if __name__ == "__main__":
    main()
