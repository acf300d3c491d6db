"""These tests run what serving runs: without checks, and compiled as for serving."""

import pytest


@pytest.fixture(autouse=True)
def as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_hsd.kernels.cpu_backend import checks

    monkeypatch.setattr(checks, "ACTIVE", checks.Checks())
    monkeypatch.delenv("TRITON_CPU_FLAGS", raising=False)
