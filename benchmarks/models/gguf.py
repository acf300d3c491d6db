"""Models out of GGUF files, written once as vLLM and transformers load them."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """A directory that `make` fills on first use.

    Processes that ask at the same time wait for the one that makes it. It is built next to its
    final place: an interrupted run leaves no half model there.
    """
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            print(f"Making {os.path.relpath(directory)} (once).", flush=True)
            part = directory.with_name(directory.name + ".part")
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(directory)
    return directory


def convert(source: Path, directory: Path, dtype: str, rms_norm_eps: float) -> None:
    """Write a GGUF file's model as safetensors, with tokenizer and chat template.

    Args:
        source: the file.
        directory: of the model.
        dtype: of the weights that are written; they are computed in float32.
        rms_norm_eps: as trained; GGUF keeps it in single precision.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf = {"gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **gguf)
    # The weights are plain now; these would make loaders look for quantized ones.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.rms_norm_eps = rms_norm_eps
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(source.parent, **gguf).save_pretrained(directory)
