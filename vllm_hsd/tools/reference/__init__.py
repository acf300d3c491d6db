"""A small reference engine on Hugging Face models; serving does not use it.

It hosts what vLLM's runners cannot: draft trees, K drafts, encoder-decoders.
"""

from vllm_hsd.tools.reference.engine import ReferenceAnswer, ReferenceEngine
from vllm_hsd.tools.reference.models import HuggingFaceLevel
from vllm_hsd.tools.reference.trees import TreeOptions

__all__ = ["HuggingFaceLevel", "ReferenceAnswer", "ReferenceEngine", "TreeOptions"]
