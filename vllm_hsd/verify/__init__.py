"""Lossless verification of drafts, as pure functions on tensors."""

from vllm_hsd.verify.chain import VerifyResult, verify_chain
from vllm_hsd.verify.rng import uniforms

__all__ = ["VerifyResult", "uniforms", "verify_chain"]
