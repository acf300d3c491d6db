"""A small reference engine on Hugging Face models; serving does not use it."""

from vllm_hsd.tools.reference.engine import ReferenceAnswer, ReferenceEngine
from vllm_hsd.tools.reference.models import HuggingFaceLevel

__all__ = ["HuggingFaceLevel", "ReferenceAnswer", "ReferenceEngine"]
