"""Damage to files: bytes changed at random, and arrays changed on purpose."""

import io
import random
import zipfile
from pathlib import Path

import numpy as np


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The content cut off, longer, with other bits, bytes or ranges."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice([1, 4, 8, 64]))
        change = rng.choice(["cut", "more", "flip", "zeros", "random", "swap", "remove"])
        if change == "cut":
            del content[at:]
        elif change == "more":
            content += rng.randbytes(rng.randint(1, 40))
        elif change == "flip" and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif change == "zeros":
            content[at:end] = bytes(end - at)
        elif change == "random":
            content[at:end] = rng.randbytes(end - at)
        elif change == "swap":
            content = content[at:] + content[:at]
        elif change == "remove":
            del content[at:end]
    return bytes(content)


def write_members(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    """An archive with raw members, as numpy's .npz is one."""
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def npy(array: np.ndarray) -> bytes:
    """An array in numpy's format, pickled if it holds objects."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def npy_header(shape: tuple[int, ...], descr: object = "<i8") -> bytes:
    """A header of numpy's format that declares an array without holding it."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer, {"shape": shape, "fortran_order": False, "descr": descr}
    )
    return buffer.getvalue()
