"""Chain verification kernels against vLLM's V2 sampler and a copy.

Every case is checked before it is timed: on the device against the reference, and again when
replayed from a CUDA graph. Times are medians of cold-cache runs (L2 is overwritten in between).
Calls that can be captured are timed as CUDA graphs. The floor is the time to read, at the copy
bandwidth measured here, the rows that any verifier must read once (see kernels/README.md). The
cases are those of the item `kernel_times` of benchmarks/gpu.
"""

from collections.abc import Callable

import torch

from benchmarks.kernels.drafts import Drafts
from benchmarks.kernels.timing import NotTimed, capture, spread_us
from tests.support import kernel_reference as reference

NOISE = 1.5


def samplers(drafts: Drafts, v2) -> dict[str, Callable[[], object]]:
    """The timed calls by name; each one verifies the whole batch."""
    choices: dict[str, Callable[[], object]] = {}
    for method in ("block", "standard"):
        for lse in (True, False):
            name = f"{method}, lse given" if lse else method
            choices[name] = lambda m=method, given=lse: drafts.ours(m, given)
    if v2 is not None:
        rejection_sample, apply_temperature, _ = v2
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
    return choices


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


def measure(drafts: Drafts, v2, bandwidth: float, repeats: int, flush) -> list[dict]:
    """A row for each sampler that is here.

    Raises:
        NotTimed: a kernel's tokens are wrong, or differ when replayed.
    """
    check_case(drafts, 8)
    rows = []
    for name, call in samplers(drafts, v2).items():
        replay = capture(call, flush.device)
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
