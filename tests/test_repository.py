"""The repository: imports without circles, names of test files, documents that are there."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_hsd"


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the package, `kernels` included."""
    found = {}
    # A walk does not follow the link vllm_hsd/kernels.
    for directory in (PACKAGE, PACKAGE / "kernels"):
        for path in directory.resolve().rglob("*.py"):
            parts = path.relative_to(directory.resolve()).with_suffix("").parts
            name = ".".join((*directory.relative_to(ROOT).parts, *parts))
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


def test_a_server_needs_no_more_than_the_package_depends_on():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"\W", each.replace("-", "_"))[0] for each in project["dependencies"]}
    tools = {each.replace("-", "_") for each in project["optional-dependencies"]["tools"]}
    used = {True: set(), False: set()}
    for name, path in modules().items():
        used[name.startswith("vllm_hsd.tools")] |= {each.split(".")[0] for each in imported(path)}
    # vLLM brings Triton, and pydantic its core; kernels import each other by relative names.
    ours = {*sys.stdlib_module_names, "vllm_hsd", "vllm", "triton", "pydantic_core"}
    ours |= {name.split(".")[-1] for name in modules()}
    assert used[False] - ours == declared
    # transformers brings two, and where the third is missing a sentence names it.
    brought = {"huggingface_hub", "tokenizers", "datasets"}
    assert used[True] - ours - declared - brought == tools


def package(name: str, known: dict[str, Path]) -> str:
    """The package that a module belongs to; "modules" for those of `vllm_hsd` itself."""
    parts = name.split(".")
    alone = len(parts) == 2 and known[name].stem != "__init__"
    return "modules" if alone or len(parts) == 1 else parts[1]


def layout() -> dict[str, tuple[set[str], bool]]:
    """Package -> what docs/design.md lets it import: other packages, and whether vLLM."""
    text = (ROOT / "docs" / "design.md").read_text().split("## Layout")[1].split("\n## ")[0]
    rows = [row.strip("|").split("|") for row in text.splitlines() if row.startswith("| ")][2:]
    return {
        package.strip(" `/"): (set(re.findall(r"\w+", allowed)), vllm.strip() == "yes")
        for package, _, allowed, vllm in rows
    }


def test_no_packages_import_each_other():
    """But for the keys of a level and what is built from them, and what all may use."""
    graph, shared = {own: others for own, (others, _) in layout().items()}, {"levels", "modules"}
    TopologicalSorter({own: graph[own] - shared for own in graph.keys() - shared}).prepare()
    assert [own for own, others in graph.items() if "tools" in others] == []


def test_packages_import_what_the_layout_allows():
    known, allowed, wrong = modules(), layout(), set()
    for name, path in known.items():
        own, used = package(name, known), imported(path)
        others = {package(other, known) for other in used & known.keys() - {PACKAGE.name}}
        wrong |= {f"{name} imports {other}" for other in others - {own} - allowed[own][0]}
        if any(n.split(".")[0] == "vllm" for n in used) and not allowed[own][1]:
            wrong.add(f"{name} imports vLLM")
    assert not wrong, "docs/design.md (Layout) does not allow it"
    assert {package(name, known) for name in known} == allowed.keys()


def test_no_two_test_files_share_a_name():
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_documents_that_are_linked_or_named_are_there():
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout")
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    files, missing = done.stdout.splitlines(), []
    for name in (file for file in files if file.endswith(".md")):
        text = (ROOT / name).read_text()
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            if not link.startswith("http") and not ((ROOT / name).parent / link).exists():
                missing.append(f"{name}: {link}")
        for path in re.findall(r"`(\w+/[\w/]+\.(?:md|csv|png|py))`", text):
            if not any(file == path or file.endswith(f"/{path}") for file in files):
                missing.append(f"{name}: {path}")
    assert missing == []


def test_the_first_screen_has_few_numbers():
    """Details are in docs/results.md."""
    screen = (ROOT / "README.md").read_text().split("\n## ")[0].split("| --- |", 1)[1]
    # No versions.
    assert 6 < len(re.findall(r"(?<!Python )\b\d\.\d\d\b(?!\.\*)", screen)) <= 12


def test_tests_that_documents_name_are_there():
    """Promises name the tests that hold them."""
    files = list((ROOT / "tests").rglob("test_*.py"))
    known = {path.stem for path in files}
    known |= {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    pages = ("docs/failures.md", "docs/lossless.md", "tests/README.md", "CONTRIBUTING.md")
    text = "".join((ROOT / page).read_text() for page in pages)
    named = set(re.findall(r"`(?:[\w/]*/)?(test_\w+)(?:\.py)?`", text))
    assert len(named) > 50 and not named - known
