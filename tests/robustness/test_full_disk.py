"""A disk that fills up while a file is written: one sentence, and the old file is still whole."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.damaged_bytes import sentence_objection
from support.plain_profile import plain_profile

from vllm_hsd.cascade.exit_head import FILE_NAME, ExitHead, write_exit_head
from vllm_hsd.cascade.text_store import collect_texts, write_store
from vllm_hsd.checked_files import written_whole
from vllm_hsd.errors import UserError
from vllm_hsd.tools.planner.profile import Profile

ROOM = 512


def write_table(path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 200, 4000)
    write_store(collect_texts([text], 200), str(path))


def write_tables_of_a_profile(path: Path) -> None:
    made = Profile(**plain_profile())
    survival = -np.sort(-np.random.default_rng(0).random((3, 3, 5, 5, 5)), axis=-1)
    made.set_tables({"block": survival, "standard": survival / 2})
    made.save(path.with_suffix(".json"))


def write_text(path: Path) -> None:
    with written_whole(path) as unfinished:
        unfinished.write_text(json.dumps(list(range(1000))))


def objection(write: Callable[[Path], None], path: Path) -> str | None:
    """What is wrong with what is left of a whole file when its successor does not fit."""
    write(path)
    whole, files = path.read_bytes(), sorted(path.parent.iterdir())
    assert len(whole) > ROOM
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        # No file can grow beyond so many bytes: writes fail as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
        write(path)
    except UserError as error:
        said = sentence_objection(str(error), path.name)
    except Exception as error:
        said = f"raises {type(error).__name__}: {error}"
    else:
        said = "says nothing"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    if path.read_bytes() != whole:
        return f"damages the file and {said}"
    return said if sorted(path.parent.iterdir()) == files else "leaves a part"


HEAD = ExitHead(2, torch.ones(8), torch.ones(500, 8), 1e-6)
WRITERS = {
    "table.npz": write_table,
    FILE_NAME: lambda path: write_exit_head(HEAD, path.parent),
    "profile.json": Profile(**plain_profile()).save,
    "profile.safetensors": write_tables_of_a_profile,
    "cascade.json": write_text,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(tmp_path, name):
    assert objection(WRITERS[name], tmp_path / name) is None


def test_the_harness_catches_a_writer_without_care(tmp_path):
    def write(path: Path) -> None:
        path.write_bytes(bytes(2 * ROOM))

    assert objection(write, tmp_path / "table.npz").startswith("damages the file")


@pytest.mark.parametrize("directory", ["missing", "a file", "x" * 300])
def test_places_that_cannot_be_written(tmp_path, directory):
    (tmp_path / "a file").touch()
    path = tmp_path / directory / "profile.safetensors"
    with pytest.raises(UserError, match="cannot write") as error:
        write_tables_of_a_profile(path)
    assert sentence_objection(str(error.value), path.name) is None
