"""Triton kernels for lossless verification."""
