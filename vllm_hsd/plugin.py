"""The `vllm.general_plugins` entry point: makes vLLM accept method "hsd"."""

from __future__ import annotations

import logging


def register() -> None:
    """Replace the one function of vLLM that reads a speculative configuration.

    vLLM calls this in every process, whether or not it will use the plugin. All other replacements
    wait for a configuration that needs them (`Registry.install`), in the process that reads it and
    in those that receive it. A process that meets none keeps vLLM as it is. So does one whose vLLM
    has no such function, which then knows no method "hsd".
    """

    from vllm_hsd.host import read_config

    try:
        read_config.REGISTRY.place(read_config.ENTRANCE)
    except (ImportError, AttributeError) as error:
        logging.getLogger(f"vllm.{__name__}").warning("vllm-hsd is off, for this vLLM: %s.", error)
