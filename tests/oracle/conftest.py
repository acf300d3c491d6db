"""Kernels of these tests are compiled for a CPU: see tests/kernels/conftest.py."""

from support import triton_cpu

triton_cpu.install()
triton_cpu.check_programs()
