"""Measure the tiny models: writes overlaps.csv next to them.

    python -m benchmarks.models.report

The overlap of two models in a context is sum_v min(p(v), q(v)) at temperature 1, the acceptance
rate of standard speculative decoding. It is measured on two kinds of context: held-out files of
the standard library (needs the library's sources, of the same Python version for the same
numbers), and text that the target continued from prompts.jsonl at temperature 1.
"""

import argparse
import itertools
import sysconfig
import zlib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import prompts, write_csv

HERE = Path(__file__).parent
NAMES = ("target", "mid", "small")
SEQUENCE = 256  # tokens, which are bytes
WINDOWS = 256  # windows of held-out text
COPIES = 4  # sampled continuations of each prompt
NEW_TOKENS = 128
SKIPPED_DIRECTORIES = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings",
    "pydoc_data", "lib-dynload", "__phello__",
}  # fmt: skip


def library_files() -> tuple[list[Path], list[Path]]:
    """Standard-library sources as (training files, held-out files: one in 25, by path)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[Path], list[Path]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # _sysconfigdata holds the paths of the machine that built Python.
        if SKIPPED_DIRECTORIES & set(name.parts) or name.name.startswith("_sysconfigdata"):
            continue
        parts[zlib.crc32(name.as_posix().encode()) % 25 == 0].append(path)
    return parts


@torch.no_grad()
def sampled_contexts(model, tokenizer, texts: list[str]) -> list[tuple[torch.Tensor, int]]:
    """Continuations sampled from `model`: (ids [1, n], the first generated position)."""
    contexts = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")
        outputs = model.generate(
            **ids, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, num_return_sequences=COPIES
        )
        for row in outputs:
            ends = (row[ids.input_ids.shape[1] :] == tokenizer.eos_token_id).nonzero()
            end = ids.input_ids.shape[1] + int(ends[0]) + 1 if len(ends) else len(row)
            contexts.append((row[None, :end], ids.input_ids.shape[1]))
    return contexts


@torch.no_grad()
def compare(models: dict, contexts: list[tuple[torch.Tensor, int]], kind: str) -> list[dict]:
    """One row per pair of models, averaged over positions; the error is over contexts."""
    pairs = list(itertools.combinations(NAMES, 2))
    sums = {pair: [] for pair in pairs}
    for ids, first in contexts:
        probs = {n: m(ids[:, :-1]).logits[0, first - 1 :].softmax(-1) for n, m in models.items()}
        for pair in pairs:
            p, q = probs[pair[0]], probs[pair[1]]
            overlap = torch.minimum(p, q).sum().item()
            agree = (p.argmax(-1) == q.argmax(-1)).sum().item()
            sums[pair].append((overlap, agree, len(p)))
    rows = []
    for pair, values in sums.items():
        overlap, agree, count = torch.tensor(values, dtype=torch.float64).T
        means = [float(x.sum() / count.sum()) for x in (overlap, agree)]
        # Standard error of a ratio of sums; contexts are independent, positions are not.
        errors = [float((x - m * count).square().sum().sqrt() / count.sum())
                  for x, m in zip((overlap, agree), means, strict=True)]  # fmt: skip
        rows.append({
            "contexts": kind, "verifier": pair[0], "drafter": pair[1],
            "positions": int(count.sum()),
            "overlap": f"{means[0]:.4f}", "overlap_error": f"{errors[0]:.4f}",
            "argmax_agreement": f"{means[1]:.4f}", "argmax_agreement_error": f"{errors[1]:.4f}",
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=Path, default=HERE)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    directory = options.models
    tokenizer = AutoTokenizer.from_pretrained(directory / "target")
    models = {
        n: AutoModelForCausalLM.from_pretrained(directory / n, dtype="float32").eval()
        for n in NAMES
    }
    texts = [path.read_text(errors="ignore") for path in library_files()[1]]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts)
    stream = torch.tensor([i for e in encoded for i in (*e.ids, tokenizer.eos_token_id)])
    windows = stream.unfold(0, SEQUENCE + 1, SEQUENCE)
    chosen = windows[torch.randperm(len(windows))[:WINDOWS]]
    rows = compare(models, [(w[None], 1) for w in chosen], "held-out text")

    contexts = sampled_contexts(models["target"], tokenizer, prompts())
    rows += compare(models, contexts, "sampled from target")
    write_csv(directory / "overlaps.csv", rows, options.threads)
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
