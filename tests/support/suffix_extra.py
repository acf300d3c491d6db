"""Tests of suffix levels are skipped where the extra [suffix] is missing, and say so."""

import importlib.util

import pytest

MISSING = importlib.util.find_spec("arctic_inference") is None
needs_suffix = pytest.mark.skipif(
    MISSING, reason="NOT TESTED: suffix levels; install the extra [suffix] (arctic-inference)"
)
