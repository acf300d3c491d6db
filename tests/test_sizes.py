"""A budget of what is to be read: lines by part, refusals, words of documents, modules served.

Each number was counted in the commit that wrote it here. A part that grows by more than 2 % has
its number raised in the same commit, or takes something out.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZES = {
    "lines of vllm_hsd without tools": 14191,
    "lines of kernels": 9319,
    "lines of tools": 14753,
    "lines of tests": 30287,
    "lines of benchmarks": 8312,
    "refusals": 230,
    "words of documents": 26000,
    "modules that a server imports": 128,
}
SERVER = """
import sys
from vllm_hsd.host import hooks
hooks.REGISTRY.load()
from vllm_hsd.host import cascade_sampler, host_speculator, spec_config, speculator
print(len([name for name in sys.modules if name.startswith("vllm_hsd")]))
"""


def sources(*directories: str) -> list[Path]:
    """Code below directories; a walk does not follow the link vllm_hsd/kernels."""
    found = [path for name in directories for path in (ROOT / name).rglob("*.*")]
    return [path for path in found if path.suffix in (".py", ".c", ".h")]


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def refusals() -> int:
    """Places that raise a `UserError`."""
    nodes = (node for path in sources("vllm_hsd") for node in ast.walk(ast.parse(path.read_text())))
    raised = (node.exc for node in nodes if isinstance(node, ast.Raise))
    return sum(isinstance(e, ast.Call) and getattr(e.func, "id", "") == "UserError" for e in raised)


def words() -> int:
    """Of all documents but the changelog and the archive of notes; a table's bars are no words."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for name in ("docs", "kernels", "tests", "benchmarks/models"):
        pages += (ROOT / name).rglob("*.md")
    found = (word for page in pages for word in page.read_text().split())
    return sum(any(sign.isalnum() for sign in word) for word in found)


def server_modules() -> int:
    command = [sys.executable, "-c", SERVER]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def test_nothing_grows_without_its_number(capsys):
    tools = sources("vllm_hsd/tools")
    package = [path for path in sources("vllm_hsd") if path not in tools]
    sizes = [lines(package), lines(sources("kernels")), lines([*tools, *sources("tools")])]
    sizes += [lines(sources("tests")), lines(sources("benchmarks"))]
    sizes += [refusals(), words(), server_modules()]
    found = dict(zip(SIZES, sizes, strict=True))
    with capsys.disabled():
        # Not stdout, which pytest-xdist keeps to itself.
        print("", *(f"{n:7} {name}" for name, n in found.items()), sep="\n", file=sys.stderr)
    assert not {name: n for name, n in found.items() if n > 1.02 * SIZES[name]}
