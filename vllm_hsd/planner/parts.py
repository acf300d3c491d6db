"""Finished parts of a long measurement on disk, so that it can be resumed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_hsd.errors import UserError


class Parts:
    """A folder of named parts, each a dictionary of arrays.

    Args:
        folder: where the parts lie; made on first use.
        of: what is being measured, as JSON; a folder made for something else is refused.

    Raises:
        UserError: the folder holds parts of another measurement.
    """

    def __init__(self, folder: Path, of: dict[str, Any]):
        self.folder = folder
        note = folder / "measurement.json"
        if note.exists():
            if json.loads(note.read_text()) != of:
                raise UserError(
                    f"'{folder}' holds an unfinished measurement with other settings: finish "
                    f"it with those, or delete the folder."
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(of))

    def get(
        self, name: str, make: Callable[..., dict[str, NDArray]], *args: Any
    ) -> dict[str, NDArray]:
        """The part of this name, made by `make(*args)` and kept unless it is there already."""
        path = self.folder / f"{name}.npz"
        if path.exists():
            with np.load(path) as stored:
                return dict(stored)
        part = make(*args)
        unfinished = path.with_suffix(".part.npz")
        np.savez_compressed(unfinished, **part)
        unfinished.rename(path)
        return part

    def delete(self) -> None:
        """Remove the folder: the measurement is finished."""
        shutil.rmtree(self.folder)
