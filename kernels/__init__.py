"""Triton kernels for lossless verification of drafts."""
