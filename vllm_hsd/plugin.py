"""The `vllm.general_plugins` entry point: teaches vLLM the method "hsd"."""

from __future__ import annotations

import functools
import logging

from vllm_hsd import compat
from vllm_hsd.config import read_speculative_config
from vllm_hsd.errors import UserError

logger = logging.getLogger(__name__)

_registered = False


def register() -> None:
    """Install the hooks of `compat.HOOKS`; vLLM calls it in every process, repeats do nothing.

    Where the installed vLLM differs from the tested releases, only method "hsd" is answered (with
    an error that says what differs); every other use of vLLM is left alone.
    """
    global _registered
    if _registered:
        return
    _registered = True
    faults = compat.faults()
    _hook_config(faults)
    if faults:
        return
    from vllm_hsd.runner_v1 import metrics

    _hook_sampling_params()
    _hook_proposer()
    _hook_rejection_sampler()
    metrics.install()


def is_registered() -> bool:
    """Whether `register` has run in this process."""
    return _registered


def _uses_hsd(speculative_config) -> bool:
    return getattr(speculative_config, "method", None) == "hsd"


def _verifies_hierarchically(speculative_config) -> bool:
    return getattr(speculative_config, "verifier", None) == "block"


def _hook_config(faults: list[str]) -> None:
    from vllm.config.vllm import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_speculative_config
    unsupported = VllmConfig._get_v2_model_runner_unsupported_features

    @functools.wraps(create)
    def create_speculative_config(self, target_model_config, target_parallel_config):
        raw = read_speculative_config(self.speculative_config)
        hsd = raw.get("method", self.spec_method) == "hsd"
        if not hsd and raw.get("rejection_sample_method") not in ("hierarchical", "block"):
            return create(self, target_model_config, target_parallel_config)
        if faults:
            raise UserError(f"vllm-hsd cannot run: {faults[0]}")
        if compat.installed_release() not in compat.TESTED:
            logger.warning(
                "vllm-hsd was tested with vLLM %s; vLLM %s has the same names, but was not run.",
                ", ".join(compat.TESTED),
                compat.installed_release(),
            )
        for key, value in (
            ("method", self.spec_method),
            ("model", self.spec_model),
            ("num_speculative_tokens", self.spec_tokens),
        ):
            if value is not None:
                raw.setdefault(key, value)
        if hsd:
            from vllm_hsd.runner_v1.spec_config import HsdSpeculativeConfig as config
        else:
            from vllm_hsd.runner_v1.stock_drafters import BlockVerificationConfig as config
        return config.create(raw, target_model_config, target_parallel_config)

    @functools.wraps(unsupported)
    def unsupported_with_cascades(self):
        features = unsupported(self)
        if _uses_hsd(self.speculative_config):
            features.append("speculative method 'hsd'")
        elif _verifies_hierarchically(self.speculative_config):
            features.append("rejection_sample_method 'hierarchical'")
        return features

    EngineArgs.create_speculative_config = create_speculative_config
    VllmConfig._get_v2_model_runner_unsupported_features = unsupported_with_cascades


def _hook_sampling_params() -> None:
    from vllm.sampling_params import SamplingParams

    validate = SamplingParams._validate_spec_decode

    @functools.wraps(validate)
    def validate_spec_decode(self, speculative_config):
        if not _uses_hsd(speculative_config):
            validate(self, speculative_config)

    SamplingParams._validate_spec_decode = validate_spec_decode


def _hook_proposer() -> None:
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    def __new__(cls, vllm_config, *args, **kwargs):
        if cls is DraftModelProposer and _uses_hsd(vllm_config.speculative_config):
            from vllm_hsd.runner_v1.proposer import CascadeProposer

            cls = CascadeProposer
        return object.__new__(cls)

    DraftModelProposer.__new__ = __new__


def _hook_rejection_sampler() -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    def __new__(cls, sampler, spec_config=None, device=None):
        if cls is RejectionSampler and _verifies_hierarchically(spec_config):
            from vllm_hsd.runner_v1.stock_drafters import StockDraftSampler

            cls = StockDraftSampler
        return object.__new__(cls)

    RejectionSampler.__new__ = __new__
