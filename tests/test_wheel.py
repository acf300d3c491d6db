"""The wheel by itself: installed into a new environment and used outside the checkout."""

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import openai
import pytest
from support.bench_check import check_bench
from support.openai_server import running_server

import vllm_hsd

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "vllm_hsd", "kernels")


def run(*command: object, **options) -> subprocess.CompletedProcess:
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=500, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources: a build writes next to them."""
    directory = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, directory / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, directory)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", directory / "dist", directory)
    return next((directory / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs a program of a new environment that has the wheel and this environment's libraries."""
    directory = tmp_path_factory.mktemp("installed")
    venv.create(directory / "venv", symlinks=True)
    binaries = directory / "venv" / "bin"
    python = binaries / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = directory / "venv" / "lib" / version / "site-packages"
    # A path in a .pth file brings the libraries without their .pth files, so without the checkout.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    work = directory / "work"
    work.mkdir()

    def call(program: str, *arguments: object) -> str:
        command = (binaries / program, *arguments)
        return run(*command, cwd=work, env=environment).stdout

    place = call("python", "-c", "import vllm_hsd; print(vllm_hsd.__file__)")
    assert Path(place.strip()).is_relative_to(packages)
    call.python = python
    return call


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    metadata = f"vllm_hsd-{vllm_hsd.__version__}.dist-info/"
    assert all(name.startswith(("vllm_hsd/", metadata)) for name in names)
    assert {"vllm_hsd/py.typed", "vllm_hsd/kernels/chain_verify.py"} <= set(names)
    assert not any("testing" in name or "test_" in name for name in names)


def test_the_command_works_without_the_checkout(installed):
    assert installed("vllm-hsd", "--version").strip() == f"vllm-hsd {vllm_hsd.__version__}"


@pytest.mark.slow
def test_doctor_works_without_the_checkout(installed):
    assert "Method 'hsd' can run here (0 problems)." in installed("vllm-hsd", "doctor")


@pytest.mark.slow
def test_bench_works_without_the_checkout(installed, text_family, tmp_path):
    """In the checkout: `cli/test_bench.py`."""
    check_bench(functools.partial(installed, "vllm-hsd"), text_family, tmp_path)


@pytest.mark.slow
def test_a_request_is_served_without_the_checkout(installed, text_family, tmp_path):
    config = {"method": "hsd", "num_speculative_tokens": 4, "levels": [{"ngram": {"max": 3}}]}
    options = dict(speculative_config=config, python=installed.python)
    with running_server(text_family.target, tmp_path, **options) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
        body = {"model": "tiny", "prompt": "a b c a b c a b", "max_tokens": 20}
        answer = client.completions.create(**body, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == 20
        assert server.total("vllm:spec_decode_num_draft_tokens_total") > 0
