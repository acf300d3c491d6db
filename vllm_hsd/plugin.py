"""The `vllm.general_plugins` entry point: makes vLLM accept method "hsd"."""

from __future__ import annotations

import logging
import sys


def register() -> None:
    """Replace the one function of vLLM that reads a speculative configuration.

    vLLM calls this in every process, whether or not it will use the plugin. All other replacements
    wait for a configuration that needs them (`Registry.install`), in the process that reads it and
    in those that receive it. A process that meets none keeps vLLM as it is, but for the filter of
    logits where our backend has made its kernels run on a CPU. So does one whose vLLM has no such
    function, which then knows no method "hsd".
    """

    from vllm_hsd.host import read_config

    try:
        read_config.REGISTRY.place(read_config.ENTRANCE)
        # By now vLLM has called `kernels.cpu_backend.platform`, where that is installed.
        if "vllm_hsd.kernels.cpu_backend.driver" in sys.modules:
            read_config.REGISTRY.place(read_config.FILTER)
    except (ImportError, AttributeError) as error:
        logging.getLogger(f"vllm.{__name__}").warning("vllm-hsd is off, for this vLLM: %s.", error)
