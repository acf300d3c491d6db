"""`make vllm-diff`: two releases, read as text."""

import zipfile

import pytest

from tools import vllm_diff
from vllm_hsd.host.registry import Hook

OLD = {
    "vllm/__init__.py": "",
    "vllm/base.py": "class Base:\n    def inherited(self):\n        return 1\n",
    "vllm/core.py": '''
from vllm.base import Base

if True:
    def same(a):  # a comment
        """A docstring."""
        return a

def changed(a):
    return a

class Runner(Base):
    slots: int = 3

    def __init__(self, config):
        self.kept = config
        self.gone, self.other = 1, 2

    @property
    def size(self):
        return 1
''',
}
NEW = {
    **OLD,
    "vllm/core.py": OLD["vllm/core.py"]
    .replace("# a comment", "")
    .replace("A docstring", "Another one")
    .replace("def changed(a):", "def changed(a, b=None):")
    .replace("self.gone", "self.renamed")
    .replace("slots: int = 3", "slots: int = 4"),
    "vllm/base.py": OLD["vllm/base.py"].replace("return 1", "return 2"),
}
NAMES = {
    "core.same": None,
    "core.changed": "changed",
    "core.Runner.inherited": "changed",
    "core.Runner.slots": "changed",
    "core.Runner.__annotations__": "changed",
    "core.Runner.kept": None,
    "core.Runner.gone": "gone",
    "core.Runner.renamed": "new",
    "core.Runner.size": None,
    "core.Runner.__new__": None,
    "core.Runner.nowhere": "not found in either",
    "nowhere.f": "not found in either",
}


@pytest.fixture
def releases(tmp_path):
    for path, text in OLD.items():
        (tmp_path / "old" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "old" / path).write_text(text)
    with zipfile.ZipFile(tmp_path / "new.whl", "w") as wheel:
        for path, text in NEW.items():
            wheel.writestr(path, text)
    return tmp_path / "old", tmp_path / "new.whl"


def test_names_are_reported_if_they_differ(releases):
    hooks = {f"vllm.{name}": Hook(f"vllm.{name}", "replaced", "why not") for name in NAMES}
    found = vllm_diff.differences(*map(vllm_diff.Release.at, releases), hooks)
    differing = sorted(f"{how}: vllm.{name}" for name, how in NAMES.items() if how)
    assert sorted(text.split(" (")[0] for text in found) == differing
    (changed,) = [text for text in found if "core.changed " in text]
    assert "+def changed(a, b=None):" in changed and "(replaced: why not)" in changed


SOURCE = """
from vllm.core import changed, same

def look(runner):
    changed(runner.gone)
    return runner.size, runner.inherited, runner.kept, runner.slots, runner.unknown
"""
READ = ("base.Base.inherited", "core.same", "core.changed")
READ += tuple(f"core.Runner.{name}" for name in ("gone", "kept", "size", "slots"))


def test_names_that_are_read_are_found_in_the_source(releases, tmp_path):
    """Of a function the interface counts: the body of `inherited` differs. Defaults differ too."""
    (tmp_path / "reads.py").write_text(SOURCE)
    (tmp_path / "other.py").write_text("def f(x):\n    return x.other\n")
    old, new = map(vllm_diff.Release.at, releases)
    reads = vllm_diff.read_names([tmp_path / "reads.py", tmp_path / "other.py"], old, [])
    assert reads == dict.fromkeys([f"vllm.{name}" for name in READ], "reads.py")
    found = vllm_diff.differences(old, new, {}, reads)
    assert [text.split(" (")[0] for text in found] == [
        "gone: vllm.core.Runner.gone",
        "changed: vllm.core.Runner.slots",
        "changed: vllm.core.changed",
    ]
    assert "(read in reads.py)" in found[0]


def test_the_command_reads_the_registry(releases, capsys):
    assert vllm_diff.main([str(path) for path in releases]) == 0
    assert "names differ" in capsys.readouterr().out
