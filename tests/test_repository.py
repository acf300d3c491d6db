"""The repository: imports without circles, names of test files, documents that are there."""

import ast
import re
import subprocess
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_hsd"


def tracked() -> list[str]:
    """Paths of the files that git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imported(path: Path) -> set[str]:
    """What a file imports, wherever in it, also for types only."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_modules_import_each_other():
    known = modules()
    graph = {name: (imported(path) & known.keys()) - {name} for name, path in known.items()}
    assert len(graph) > 50
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle.


def test_the_core_imports_no_vllm():
    for directory in ("core", "verify"):
        for path in (PACKAGE / directory).glob("*.py"):
            assert not {name for name in imported(path) if name.split(".")[0] == "vllm"}, path


def test_no_two_test_files_share_a_name():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_documents_that_are_linked_or_named_are_there():
    files = tracked()
    missing = []
    for name in files:
        if not name.endswith(".md"):
            continue
        text = (ROOT / name).read_text()
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not link.startswith("http") and not ((ROOT / name).parent / link).exists():
                missing.append(f"{name}: {link}")
        for path in re.findall(r"`(\w+/[\w/]+\.(?:md|csv|png))`", text):
            if not any(file == path or file.endswith(f"/{path}") for file in files):
                missing.append(f"{name}: {path}")
    assert missing == []
