"""The CPU backend's options for tests find what they are for; each in a process of its own.

They are read before kernels are compiled.
"""

import os
import subprocess
import sys

import pytest

KERNELS = """
import torch
import triton
import triton.language as tl
from vllm_hsd.kernels import cpu_backend

cpu_backend.install()


@triton.jit
def shift_kernel(out_ptr, x_ptr, n, N: tl.constexpr, OTHER: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i + 1, mask=i < n)
    if OTHER:
        out_ptr += n
    tl.store(out_ptr + i, x)


@triton.jit
def scalar_kernel(out_ptr, x_ptr, n):
    for k in range(n):
        row = x_ptr
        for j in range(k):
            row += 1
        tl.atomic_add(out_ptr, tl.load(row))


@triton.jit
def last_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def assert_kernel(x_ptr):
    tl.device_assert(tl.load(x_ptr) > 0, "not positive")


@triton.jit
def noinline_kernel(x_ptr):
    tl.store(x_ptr, tl.inline_asm_elementwise("", "=r,r", [tl.load(x_ptr)], tl.int32, True, 1))


def zeros(n):
    return torch.zeros(n, dtype=torch.int32)


def tried(kernel, *args, grid=1, **options):
    try:
        kernel[(grid,)](*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

"""


def run(tmp_path, code: str, **environment: str) -> list[str]:
    """The lines that code prints after KERNELS."""
    script = tmp_path / "kernels_of_test.py"
    script.write_text(KERNELS + code)
    environment = {**os.environ, "TRITON_CPU_FLAGS": "-O0", **environment}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_bounds(tmp_path):
    code = """
print(tried(shift_kernel, zeros(64), zeros(65), 64, 64, False))
print(tried(shift_kernel, zeros(64), zeros(64), 64, 64, False))
print(tried(shift_kernel, zeros(64), zeros(64), 63, 64, False))
print(tried(shift_kernel, zeros(128)[:64], zeros(65), 64, 64, False, grid=2))
print(tried(shift_kernel, zeros(64), zeros(65), 64, 64, True))
print(tried(scalar_kernel, zeros(1), zeros(4), 5))
print(tried(scalar_kernel, zeros(0), zeros(4), 4))
"""
    line = KERNELS.splitlines().index("    x = tl.load(x_ptr + i + 1, mask=i < n)") + 1

    def outside(after: int, program: int, offset: int, name: str) -> str:
        return (
            f"IndexError: kernels_of_test.py:{line + after}, program ({program}, 0, 0): {offset} "
            f"bytes after the start of argument '{name}' is outside of its tensor"
        )

    assert run(tmp_path, code, TRITON_CPU_CHECKS="bounds") == [
        "nothing",
        outside(0, 0, 256, "x_ptr"),
        "nothing",
        outside(3, 1, 256, "out_ptr"),
        outside(3, 0, 256, "out_ptr"),
        outside(12, 0, 16, "x_ptr"),
        outside(12, 0, 0, "out_ptr"),
    ]


def test_order_of_programs(tmp_path):
    code = """
for order in (checks.ACTIVE.order, 2, 3, None):
    checks.ACTIVE.order, out = order, zeros(1)
    last_kernel[(64,)](out)
    print(out.item())
"""
    start = "from vllm_hsd.kernels.cpu_backend import checks\n"
    *ends, ascending = run(tmp_path, start + code, TRITON_CPU_CHECKS="order=1")
    assert len(set(ends)) == 3 and ascending == "63", ends


def test_a_failed_assertion_raises(tmp_path):
    code = "print(tried(assert_kernel, zeros(1))); print(tried(assert_kernel, zeros(1) + 1))"
    first, second = run(tmp_path, code, TRITON_DEBUG="1")
    assert first.startswith("AssertionError: kernels_of_test.py:") and "not positive" in first
    assert second == "nothing"


def test_what_is_not_known_raises_with_kernel_and_line(tmp_path):
    """And a function that C does not know is found when compiling."""
    code = """
print(tried(noinline_kernel, zeros(1)))
print(tried(scalar_kernel, zeros(1).bfloat16(), zeros(1).bfloat16(), 1))
"""
    unknown, *undeclared = run(tmp_path, code)
    line = KERNELS.splitlines().index("def noinline_kernel(x_ptr):") + 2
    assert unknown == (
        f"Unsupported: noinline_kernel (kernels_of_test.py:{line}): the operation "
        "tt.elementwise_inline_asm"
    )
    found = "\n".join(undeclared)
    assert found.startswith("RuntimeError: ") and "implicit declaration" in found


def test_without_a_compiler_it_says_what_to_install(tmp_path):
    """Also for gcc before release 12, which has no half floats, and without Python's headers.

    A compiler may be several words, such as `ccache gcc`; the option would be lost, and the
    kernel's object a program.
    """
    old = tmp_path / "old-gcc"
    old.write_text('#!/bin/sh\nexec gcc -D_Float16=unknown_type "$@"\n')
    old.chmod(0o755)
    code = f"""
import os
from pathlib import Path
from vllm_hsd.kernels.cpu_backend import toolchain

headers = toolchain.HEADERS
for compiler, toolchain.HEADERS in (
    ("no-such-compiler", headers), ({str(old)!r}, headers), ("gcc", Path("none")),
    ("env gcc", headers),
):
    os.environ["CC"] = compiler
    print(tried(last_kernel, zeros(1)))
"""
    *failed, found = run(tmp_path, code, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    for each, package in zip(failed, ("gcc", "gcc-12", "python3-dev"), strict=True):
        assert each.startswith("RuntimeError: ") and f"apt install {package};" in each
    assert found == "nothing"


@pytest.mark.parametrize("text", ["bound", "order=", "threads=two", "bounds=1"])
def test_a_misspelled_option_is_refused(text):
    from vllm_hsd.kernels.cpu_backend.checks import Checks

    with pytest.raises(ValueError, match="write bounds, order=SEED or threads=COUNT"):
        Checks.parse(text)
