"""Pack vLLM 0.32 for a GPU host without a network that has torch, Triton and transformers.

    python -m benchmarks.gpu.pack vllm.tar.xz      # or `make gpu-pack`: 37 MB
    tar xJf vllm.tar.xz -C DIRECTORY               # there; put DIRECTORY on PYTHONPATH

Of the wheel's libraries it takes the two that every model needs, with the machine code of compute
capability 9.0 alone. Attention's are left out: give engines `"attention_backend": "TRITON_ATTN"`.
"""

from __future__ import annotations

import argparse
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

RELEASE, PYTHON, CAPABILITY = "0.32.0", "3.12", 90
LIBRARIES = ("_C_stable_libtorch", "_moe_C_stable_libtorch")
# Import fails without one of attention's libraries, used or not.
STAND_IN = "vllm/vllm_flash_attn/_vllm_fa3_C.py"
# What a host with torch, transformers, matplotlib and pytest lacks of vLLM's requirements.
PACKAGES = """
annotated-types apache-tvm-ffi==0.1.11 astor blake3 cachetools cbor2 compressed-tensors==0.17.0
depyf==0.20.0 dill distro fastapi==0.136.0 httpx2 ijson interegular jiter jsonschema
jsonschema-specifications lark==1.2.2 llguidance==1.7.0 lm-format-enforcer==0.11.3 loguru
mistral_common msgspec openai oss-harmony outlines_core==0.2.14 partial-json-parser
prometheus-fastapi-instrumentator pybase64 pycountry pydantic==2.12.5 pydantic-core==2.41.5
pydantic-extra-types python-json-logger pyzmq referencing rpds-py setproctitle sniffio starlette
typing-inspection watchfiles xgrammar==0.2.8
""".split()  # noqa: SIM905
# Large, and read by no item.
UNREAD = ("mistral_common/data/*", "pycountry/locales", "bin")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
# A fat binary and its entries: magic number, sizes of a header, offset of the capability.
MAGIC, HEADER, CAPABILITY_AT = struct.pack("<I", 0xBA55ED50), 16, 0x1C


def pruned(library: bytes) -> bytes:
    """A library whose machine code for other capabilities is zeros, so that it compresses."""
    found, at = bytearray(library), 0
    while (at := found.find(MAGIC, at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", found, at + 4)
        if version != 1 or header != HEADER or at + HEADER + size > len(found):
            at += 4
            continue
        entry, end = at + HEADER, at + HEADER + size
        while entry < end:
            own, code = struct.unpack_from("<IQ", found, entry + 4)
            if struct.unpack_from("<I", found, entry + CAPABILITY_AT)[0] != CAPABILITY:
                found[entry + own : entry + own + code] = bytes(code)
            entry += own + code
        at = end
    return bytes(found)


def write(site: Path, downloads: Path) -> None:
    """vLLM and PACKAGES in `site`."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    wanted = ["--no-deps", "--only-binary=:all:", f"--python-version={PYTHON}"]
    wanted += ["--implementation=cp", *(f"--platform={name}" for name in PLATFORMS)]
    subprocess.run(
        [*pip, "download", *wanted, f"--dest={downloads}", f"vllm=={RELEASE}"], check=True
    )
    subprocess.run([*pip, "install", *wanted, f"--target={site}", *PACKAGES], check=True)
    (wheel,) = downloads.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            library = name.endswith(".so")
            if library and not any(name == f"vllm/{each}.abi3.so" for each in LIBRARIES):
                continue
            if name == "vllm/vllm-rs" or "/include/" in name or name.endswith("/RECORD"):
                continue
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pruned(archive.read(name)) if library else archive.read(name))
    (site / STAND_IN).write_text('"""Not carried: the Triton attention backend serves."""\n')
    for pattern in (*UNREAD, "**/__pycache__"):
        for path in list(site.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory, "site")
        write(site, Path(directory, "downloads"))
        with tarfile.open(output, "w:xz") as archive:
            archive.add(site, ".")
    print(f"{output}: {output.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
