"""Lossless verification of drafts, as pure functions on tensors."""

from vllm_hsd.rules.chain import verify_chain
from vllm_hsd.rules.tree import Tree, draw_iid, draw_without_replacement, verify_tree

# The longest draft that the kernels verify, in tokens.
MAX_KERNEL_DRAFT = 63
# The largest tree.
MAX_KERNEL_NODES = 64

__all__ = [
    "MAX_KERNEL_DRAFT",
    "MAX_KERNEL_NODES",
    "Tree",
    "draw_iid",
    "draw_without_replacement",
    "verify_chain",
    "verify_tree",
]
