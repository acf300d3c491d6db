"""A device that is not there: CPU tensors that refuse what CUDA ones refuse.

Inside `emulated()` tensors made for the device "cuda" are marked. A marked tensor says so
(`tensor.device`), is not readable by NumPy, and an operation that mixes it with an unmarked tensor
of one dimension or more raises, as CUDA's would: but for indices and copies, which torch brings to
the device by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

CUDA = torch.device("cuda", 0)
_COPIES = {torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.copy_}
_HOST = {torch.Tensor.numpy, torch.Tensor.__array__}
_MOVES = {torch.Tensor.to, torch.Tensor.cpu}


class Marked(torch.Tensor):
    """A tensor of the emulated device; its numbers are on the CPU."""


class _Device(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        marked = any(isinstance(leaf, Marked) for leaf in tensors)
        first_marked = bool(args) and isinstance(args[0], Marked)
        if func == torch.Tensor.device.__get__ and first_marked:
            return CUDA
        if func == torch.Tensor.is_cuda.__get__ and first_marked:
            return True
        if func in _HOST and first_marked:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        result_marked = marked
        if func in _MOVES:
            result_marked = func is torch.Tensor.to and _target(args[1:], kwargs, first_marked)
        elif kwargs.get("device") is not None:
            result_marked = torch.device(kwargs["device"]).type == "cuda"
        elif marked and func not in _COPIES:
            plain = [t for t in tensors if not isinstance(t, Marked) and t.dim() > 0]
            if plain:
                raise RuntimeError(f"{func.__name__}: tensors on cuda:0 and on cpu")
        elif func in (torch.Tensor.__setitem__, torch.Tensor.__getitem__) and not first_marked:
            if marked and isinstance(args[1], Marked):
                raise RuntimeError("indices should be on cpu as the indexed tensor is")
            result_marked = first_marked
        args, kwargs = tree_map(_unmarked, (args, kwargs))
        found = func(*args, **kwargs)
        return tree_map(_marked, found) if result_marked else found


def _target(args: tuple, kwargs: dict, marked: bool) -> bool:
    """Whether `to` moves to the emulated device, or stays there."""
    for given in (*args, kwargs.get("device"), kwargs.get("other")):
        if isinstance(given, torch.Tensor):
            return isinstance(given, Marked)
        if isinstance(given, torch.device | str):
            return torch.device(given).type == "cuda"
    return marked


def _unmarked(leaf):
    if isinstance(leaf, Marked):
        return leaf.as_subclass(torch.Tensor)
    if isinstance(leaf, torch.device | str) and str(leaf).startswith("cuda"):
        return torch.device("cpu")
    return leaf


def _marked(leaf):
    return leaf.as_subclass(Marked) if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def emulated() -> Iterator[None]:
    """Within it, "cuda" is the emulated device."""
    with torch._C.DisableTorchFunctionSubclass(), _Device():
        yield
