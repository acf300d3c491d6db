"""A small reference engine on Hugging Face models; serving does not use it.

It hosts what vLLM's runners cannot: models below encoder-decoders.
"""

from vllm_hsd.tools.reference.engine import ReferenceAnswer, ReferenceEngine
from vllm_hsd.tools.reference.models import HuggingFaceLevel

__all__ = ["HuggingFaceLevel", "ReferenceAnswer", "ReferenceEngine"]
