"""Lossless verification of drafts, as pure functions on tensors."""
