"""Early exits run outside torch.compile: with vLLM's kernels, not with one per operation."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import ir
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.config.kernel import IrOpPriorityConfig
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_hsd.host import program_models

# Views launch nothing.
VIEWS = ("empty", "view", "slice", "split", "unsqueeze", "chunk", "expand", "detach")


class Counted(TorchDispatchMode):
    """Operations on meta tensors; vLLM's compiled ones are counted and not run."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.count += not any(view in name for view in VIEWS)
        return None if name.startswith("_C.") else func(*args, **(kwargs or {}))


@pytest.fixture
def as_compiled(monkeypatch):
    """A configuration under which vLLM leaves its kernels to the compiler."""
    import vllm.kernels.vllm_c  # noqa: F401  fills the table of implementations

    for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        monkeypatch.setitem(vars(op.impls["vllm_c"]), "supported", True)
    # As on CUDA, which this build of vLLM lacks.
    priority = IrOpPriorityConfig.with_default(["vllm_c", "native"], gelu_and_mul_sparse=["native"])
    platform = SimpleNamespace(get_default_ir_op_priority=lambda config: priority)
    monkeypatch.setattr(program_models, "current_platform", platform)
    config = VllmConfig(compilation_config=CompilationConfig(mode=3, custom_ops=["none"]))
    with set_current_vllm_config(config), ir.enable_torch_wrap(False):
        yield config


def test_a_layer_takes_four_kernels_besides_its_products_and_attention(as_compiled):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    theta = {"rope_type": "default", "rope_theta": 1e6}
    with torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
        norms, activation = (RMSNorm(4096), RMSNorm(4096)), SiluAndMul()
        rope = get_rope(128, max_position=1024, rope_parameters=theta)
    activation.op = torch.ops._C.silu_and_mul
    parts = torch.nn.ModuleList([*norms, activation, rope])

    def layer() -> int:
        with Counted() as counted:
            for norm in norms:
                norm(meta(32, 4096), meta(32, 4096))
            rope(meta(32, dtype=torch.int64), meta(32, 4096), meta(32, 1024))
            activation(meta(32, 2 * 12288))
        return counted.count

    native = layer()
    kernels = program_models.Uncompiled([parts], as_compiled, "cuda")
    with kernels.in_use():
        assert layer() == 4
    assert native >= 40
    # The compiled model is left as it was.
    assert layer() == native
