"""Differences between two releases of vLLM in the names that this package depends on.

Names that are replaced, changed or overridden come from the registry, whose modules import the
installed vLLM; they are compared whole. Names that are only read come from the package's source:
what it imports of vLLM, and its attribute accesses as far as a class of an imported module, or one
that such a module imports, has an attribute of that name. That is more than is really read, so of
these only the interface is compared. Both releases are only read, as text.

    python -m tools.vllm_diff OLD NEW

OLD and NEW: a wheel, or a directory that holds `vllm/` (site-packages, an unpacked wheel, a clone).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import vllm_hsd
from vllm_hsd.host.registry import Hook

PACKAGE = Path(vllm_hsd.__file__).parent
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Release:
    """The source of one release.

    Args:
        root: directory or wheel that holds `vllm/`.

    Raises:
        ValueError: it does not.
    """

    root: Path | zipfile.Path
    modules: dict[str, ast.Module | None] = field(default_factory=dict)

    @staticmethod
    def at(path: Path) -> Release:
        if not path.exists():
            raise ValueError(f"'{path}' is not there.")
        root = zipfile.Path(path) if path.suffix == ".whl" else path
        if not (root / "vllm" / "__init__.py").is_file():
            raise ValueError(f"'{path}' holds no vllm/.")
        return Release(root)

    def module(self, name: str) -> ast.Module | None:
        """The parsed module, None where there is none."""
        if name not in self.modules:
            path = "/".join(name.split("."))
            self.modules[name] = None
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if (self.root / file).is_file():
                    self.modules[name] = ast.parse((self.root / file).read_text(encoding="utf-8"))
                    break
        return self.modules[name]

    def source(self, name: str) -> str | None:
        """What defines a dotted name, without comments and docstrings; None where nothing does."""
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            module = ".".join(parts[:cut])
            if self.module(module) is not None:
                found = self._member(module, parts[cut], set())
                if len(parts) == cut + 1:
                    return found and _text(found[1])
                if found and isinstance(found[1], ast.ClassDef) and len(parts) == cut + 2:
                    return self._attribute(found[0], found[1], parts[-1])
                return None
        return None

    def classes(self, module: str) -> dict[str, ast.ClassDef]:
        """Classes that a module defines or imports from another one of vLLM, by dotted name."""
        tree = self.module(module)
        found: dict[str, ast.ClassDef] = {}
        for node in _statements(tree.body if tree else []):
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                names = [alias.name for alias in node.names]
            for name in names:
                member = self._member(module, name, set())
                if member and isinstance(member[1], ast.ClassDef):
                    found[f"{member[0]}.{name}"] = member[1]
        return found

    def interface(self, name: str) -> str | None:
        """As `source`, of a function without its body, of a class without its members."""
        text = self.source(name)
        if not text:
            return text
        tree = ast.parse(text)
        for node in tree.body:
            if isinstance(node, ast.ClassDef | Function):
                node.body = [ast.Pass()]
        return ast.unparse(tree)

    def _member(self, module: str, name: str, seen: set) -> tuple[str, ast.AST] | None:
        """(module, statement) that defines a name of a module, through imports."""
        tree = self.module(module)
        if tree is None or (module, name) in seen:
            return None
        seen.add((module, name))
        for node in _statements(tree.body):
            if isinstance(node, ast.ClassDef | Function) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self._member(node.module, alias.name, seen)
                        if found:
                            return found
        return None

    def _attribute(self, module: str, cls: ast.ClassDef, name: str) -> str | None:
        """Definitions of an attribute in a class, or else in its bases."""
        if name == "__annotations__":
            return "\n".join(_text(node) for node in cls.body if isinstance(node, ast.AnnAssign))
        found = []
        for node in cls.body:
            if (isinstance(node, Function) and node.name == name) or (
                isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node)
            ):
                found.append(_text(node))
        if not found:
            for node in ast.walk(cls):
                targets = _targets(node) if isinstance(node, ast.Assign | ast.AnnAssign) else []
                if f"self.{name}" in targets:
                    found.append(_text(node))
        if found:
            return "\n".join(found)
        for base in cls.bases:
            outer = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(outer, ast.Name):
                parent = self._member(module, outer.id, set())
                if parent and isinstance(parent[1], ast.ClassDef):
                    inherited = self._attribute(*parent, name)
                    if inherited is not None:
                        return inherited
        # Every class has these.
        return "" if name in ("__new__", "__init__") else None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from _statements(getattr(node, part, []))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [
        ast.unparse(name)
        for target in targets
        for name in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]


def _text(node: ast.AST) -> str:
    """Source without comments and docstrings."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.ClassDef | Function) and ast.get_docstring(inner, clean=False):
            inner.body = inner.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def registered() -> dict[str, Hook]:
    """All names of the registry, that of the function that reads configurations too."""
    from vllm_hsd.host.read_config import REGISTRY

    REGISTRY.load()
    return dict(REGISTRY.hooks)


def read_names(
    files: Iterable[Path], release: Release, registered: Iterable[str]
) -> dict[str, str]:
    """Names of vLLM that source files may read, and the first file that may.

    Args:
        files: modules; those that neither import vLLM nor register a name are passed over.
        release: where classes are looked up.
        registered: names whose modules hand objects to the package.
    """
    imported: dict[str, str] = {}
    attributes: dict[str, str] = {}
    modules = {name.rpartition(".")[0].rpartition(".")[0] for name in registered}
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        ours = False
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                if node.module.split(".")[0] == "vllm":
                    modules.add(node.module)
                    for alias in node.names:
                        imported.setdefault(f"{node.module}.{alias.name}", file.name)
                ours |= node.module.split(".")[0] == "vllm" or node.module.endswith("hooks")
            elif isinstance(node, ast.Import):
                ours |= any(alias.name.split(".")[0] == "vllm" for alias in node.names)
        for node in nodes if ours else ():
            if isinstance(node, ast.Attribute):
                attributes.setdefault(node.attr, file.name)
    found = {name: file for name, file in imported.items() if release.module(name) is None}
    for module in sorted(modules):
        for cls, node in release.classes(module).items():
            for name in _members(node) & attributes.keys():
                found.setdefault(f"{cls}.{name}", attributes[name])
    return found


def _members(cls: ast.ClassDef) -> set[str]:
    """Names of a class's own attributes, those that its methods set on instances too."""
    found = set()
    for node in ast.walk(cls):
        if isinstance(node, Function):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {target.removeprefix("self.") for target in _targets(node)}
    return found


def differences(
    old: Release, new: Release, hooks: dict[str, Hook], reads: Mapping[str, str] = _NO_NAMES
) -> list[str]:
    """A paragraph for every name that is not the same in both.

    Args:
        old, new: the releases.
        hooks: names whose definitions are compared.
        reads: names whose interfaces are compared, with the file that reads each.
    """
    found = []
    names = {name: f"{hook.how}: {hook.why}" for name, hook in hooks.items()}
    names |= {name: f"read in {file}" for name, file in reads.items() if name not in hooks}
    for name, how in sorted(names.items()):
        whole = name in hooks
        before, after = (
            release.source(name) if whole else release.interface(name) for release in (old, new)
        )
        if before == after and (before is not None or not whole):
            continue
        head = f"{name} ({how})"
        if before is None or after is None:
            where = "not found in either" if before is after else "gone" if after is None else "new"
            found.append(f"{where}: {head}")
            continue
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
        body = [f"    {line}" for line in lines if not line.startswith(("---", "+++"))]
        found.append("\n".join([f"changed: {head}", *body]))
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="wheel or directory with vllm/")
    parser.add_argument("new", type=Path, help="wheel or directory with vllm/")
    arguments = parser.parse_args(argv)
    try:
        old, new = Release.at(arguments.old), Release.at(arguments.new)
    except ValueError as error:
        parser.error(str(error))
    hooks = registered()
    reads = read_names(sorted(PACKAGE.rglob("*.py")), old, hooks)
    found = differences(old, new, hooks, reads)
    print("\n\n".join(found))
    print(f"\n{len(found)} of {len(hooks.keys() | reads.keys())} names differ.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
