"""Zero-pad a tiny Llama-architecture model to the cost of a large one, with the same function.

    python -m benchmarks.models.zero_pad --params 300e6 --output results/models/zero-padded-300M

On a CPU a forward pass of a 5 M parameter target costs little more than one of its drafters, so
speculation could not pay. The zero-padded target has the same layers, but MLPs with many more
hidden units, all of whose weights are zero: each forward pass reads and multiplies them, and they
add nothing. Every figure from a zero-padded target measures the cost of a model of that size with
the text and the acceptance of the tiny one, and has to say so.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import RESULTS

DEFAULT_PARAMS = 300_000_000
STAMP = "zero_padded.json"


def intermediate_size_for(source_dir: str | Path, params: float = DEFAULT_PARAMS) -> int:
    """The MLP width, a multiple of 64, that gives the model about `params` parameters.

    Raises:
        ValueError: the source has more parameters than that.
    """
    config = json.loads((Path(source_dir) / "config.json").read_text())
    own = sum(t.numel() for t in load_file(Path(source_dir) / "model.safetensors").values())
    per_unit = 3 * config["hidden_size"] * config["num_hidden_layers"]
    extra = round((params - own) / per_unit / 64) * 64
    if extra < 0:
        raise ValueError(f"params={params:.0f} is below the {own} parameters of {source_dir}.")
    return config["intermediate_size"] + extra


def zero_pad(source_dir: str | Path, out_dir: str | Path, intermediate_size: int) -> Path:
    """Write a copy of a Llama-architecture model whose MLPs have `intermediate_size` units.

    In every layer gate_proj and up_proj, [intermediate, hidden], get rows of zeros and down_proj,
    [hidden, intermediate], gets columns of zeros, in the dtype of the source. A new unit computes
    silu(0) * 0 = 0 and adds 0 to the output: in exact arithmetic the function is the same. In
    floating point the logits are equal up to rounding, not bit for bit, because a matrix product
    over more columns may add the same numbers in another order; greedy output can differ where
    two logits tie to about 1e-5. Compare a padded target with itself when outputs must be equal.

    An `out_dir` that already holds these weights padded to this size is left as it is.

    Returns:
        `out_dir`.

    Raises:
        ValueError: `intermediate_size` is below the source's own, or `out_dir` exists and holds
            something else.
    """
    source, out = Path(source_dir), Path(out_dir)
    weights = source / "model.safetensors"
    config = json.loads((source / "config.json").read_text())
    own = config["intermediate_size"]
    if intermediate_size < own:
        raise ValueError(f"intermediate_size={intermediate_size} is below the model's own {own}.")
    stamp = {
        "intermediate_size": intermediate_size,
        "source_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    if (out / STAMP).exists() and json.loads((out / STAMP).read_text()) == stamp:
        return out
    if out.exists() and any(out.iterdir()) and not (out / STAMP).exists():
        raise ValueError(f"out_dir={out} holds other files; name an empty or a new directory.")

    # Built next to its final place, so that an interrupted run leaves no half model there.
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, ignore=shutil.ignore_patterns("model.safetensors"))
    tensors = load_file(weights)
    for name, old in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = torch.zeros(intermediate_size, old.shape[1], dtype=old.dtype)
            tensors[name][:own] = old
        elif name.endswith("down_proj.weight"):
            tensors[name] = torch.zeros(old.shape[0], intermediate_size, dtype=old.dtype)
            tensors[name][:, :own] = old
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    config["intermediate_size"] = intermediate_size
    (part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (part / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    part.rename(out)
    return out


def padded_to(source: Path, params: float) -> Path:
    """A model at the cost of so many parameters, made in results/models on first use."""
    out = RESULTS / "models" / f"{source.name}-{params / 1e6:.0f}M"
    out.parent.mkdir(parents=True, exist_ok=True)
    return zero_pad(source, out, intermediate_size_for(source, params))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--source", type=Path, default=Path(__file__).parent / "target")
    parser.add_argument("--params", type=float, default=DEFAULT_PARAMS)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    size = intermediate_size_for(options.source, options.params)
    print(f"{zero_pad(options.source, options.output, size)}: intermediate_size {size}")


if __name__ == "__main__":
    main()
