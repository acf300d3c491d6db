"""Damaged copies of a model, and patches that record what an engine does with them."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_hsd.tools.audit.mutants import replace

RECORD = "HSD_TEST_RECORD"  # The variable that names the file.
WEIGHTS = "model.safetensors"


def damaged_copy(model: str, directory: Path, damage: Callable[[Path], None]) -> str:
    """A copy of the model's directory with `damage` done to it."""
    shutil.copytree(model, directory)
    damage(directory)
    return str(directory)


def change_weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Damage that edits the state dict in place."""

    def damage(directory: Path) -> None:
        weights = load_file(directory / WEIGHTS)
        change(weights)
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})

    return damage


def change_config(**values) -> Callable[[Path], None]:
    return change_file(lambda c: json.dumps(json.loads(c) | values).encode(), "config.json")


def fill(name: str, index: object, value: float) -> Callable[[Path], None]:
    """Damage that sets a part of a tensor."""
    return change_weights(lambda weights: weights[name].__setitem__(index, value))


def cut(name: str, *index: slice) -> Callable[[Path], None]:
    """Damage that keeps a part of a tensor."""
    return change_weights(lambda weights: weights.update({name: weights[name][index].clone()}))


def change_file(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def record_warnings() -> None:
    """Append every warning of this package to the record, one line each."""
    handler = logging.FileHandler(os.environ[RECORD])
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("vllm_hsd").addHandler(handler)


def record_positions() -> None:
    """Keep the highest position that each model was fed, by the prefix of its weights' names."""
    record, highest = Path(os.environ[RECORD]), {}

    def init_with_prefix(init, self, *, prefix="", **kwargs):
        init(self, prefix=prefix, **kwargs)
        self.recorded_as = prefix

    def forward_recorded(forward, self, input_ids, positions, *args, **kwargs):
        position = int(positions.max())
        if position > highest.get(self.recorded_as, -1):
            highest[self.recorded_as] = position
            record.write_text(json.dumps(highest))
        assert position < self.config.max_position_embeddings, self.recorded_as
        return forward(self, input_ids, positions, *args, **kwargs)

    for name, patch in (("__init__", init_with_prefix), ("forward", forward_recorded)):
        replace(f"vllm.model_executor.models.llama:LlamaModel.{name}", patch)
