"""What follows from the platform that vLLM serves on."""

from __future__ import annotations


def read_on_host() -> bool:
    """Whether the host reads what was drafted, and chooses by it what is drafted next: on a CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
