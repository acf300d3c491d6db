"""A small reference engine on Hugging Face models, for settings that vLLM cannot host."""

from vllm_hsd.reference.engine import Generation, ReferenceEngine
from vllm_hsd.reference.models import HuggingFaceLevel
from vllm_hsd.reference.trees import TreePlan

__all__ = ["Generation", "HuggingFaceLevel", "ReferenceEngine", "TreePlan"]
