"""Scripts of benchmarks/ as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_script(name: str) -> ModuleType:
    """The module `benchmarks/NAME`, loaded as when it is run: its neighbors can be imported."""
    path = BENCHMARKS / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return module
