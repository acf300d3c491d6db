"""The registry of the vLLM names that this package replaces, changes or overrides: its rules.

`host.hooks` has the one that serves. Replacements register themselves with `Registry.replaces`.
`Registry.install` compares all names with the installed vLLM and then replaces all or nothing.

A replacement takes the replaced function as its first argument. Nothing is replaced before a
configuration asks for it, except the one function that reads configurations (see plugin.py).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name as resolve
from typing import Literal

from vllm_hsd.errors import UserError

TESTED = ("0.32", "0.33")

# A proposal for an interface for speculative methods of plugins.
PLUGIN_ISSUE = "vllm-project/vllm#36219"
NONE_FILED = "none filed"

How = Literal["replaced", "changed", "on runner", "overridden"]

# Attribute of a function that replaces one of vLLM's. Not `__wrapped__`: every plugin sets that.
_MARK = "__vllm_hsd__"


@dataclass(frozen=True)
class Hook:
    """One name (module and attributes) of vLLM that this package replaces, changes or overrides.

    What is only read has no entry: its absence raises by itself, and `tools.vllm_diff` finds it in
    the source.

    Attributes:
        how: "replaced" in its class or module; "changed" in place; "on runner" replaced on one
            runner instance; "overridden" in a subclass of ours.
        why: purpose of the dependency.
        parameters: names of parameters in order, separated by spaces; None for what is not a
            function. Where releases differ, a tuple of such.
        issue: vLLM issue or pull request about what makes it necessary, or NONE_FILED; empty for
            what is only overridden.
        until: when the dependency can go.
        missing: releases of TESTED that do not have it.
    """

    name: str
    how: How
    why: str
    parameters: str | tuple[str, ...] | None = None
    issue: str = ""
    until: str = ""
    missing: tuple[str, ...] = ()


class Registry:
    """Names of vLLM, and what replaces them.

    Args:
        package: package whose modules register names when they are imported.
        modules: those modules.
    """

    def __init__(self, package: str, modules: tuple[str, ...] = ()) -> None:
        self.hooks: dict[str, Hook] = {}
        self.replacements: dict[str, Callable] = {}
        self._package, self._modules = package, modules
        self._installed = False
        self._lock = threading.RLock()

    def register(self, hook: Hook) -> None:
        """Add a name; raises ValueError if it is there already."""
        if hook.name in self.hooks:
            raise ValueError(f"'{hook.name}' is registered twice")
        self.hooks[hook.name] = hook

    def overrides(
        self,
        names: Mapping[str, tuple[str, str | tuple[str, ...] | None]],
        missing: tuple[str, ...] = (),
    ) -> None:
        """Add names that subclasses of ours override: name -> (why, parameters)."""
        for name, (why, parameters) in names.items():
            self.register(Hook(name, "overridden", why, parameters, missing=missing))

    def replaces(
        self,
        name: str,
        parameters: str | tuple[str, ...] | None = None,
        *,
        why: str,
        until: str = "",
        issue: str = NONE_FILED,
        how: How = "replaced",
    ) -> Callable[[Callable], Callable]:
        """Register the decorated function as the replacement of a function or method of vLLM.

        It is called as f(original, *arguments); "on runner" as f(original, owner, *arguments) for a
        method of one object. One that has "changed" a name is called by `install`.
        """
        hook = Hook(name, how, why, parameters, issue, until)

        def decorate(replacement: Callable) -> Callable:
            self.register(hook)
            self.replacements[name] = replacement
            return replacement

        return decorate

    changes = functools.partialmethod(replaces, how="changed")
    replaces_on_runner = functools.partialmethod(replaces, how="on runner")

    def install(self) -> None:
        """Replace and change all registered names of vLLM; does nothing when called again.

        Raises UserError, and replaces nothing, where the installed vLLM differs.
        """
        with self._lock:
            if self._installed:
                return
            if found := self.faults():
                raise UserError(f"vllm-hsd cannot run: {found[0]}")
            for hook in self.hooks.values():
                if hook.how == "replaced":
                    self.place(hook.name)
                elif hook.how == "changed":
                    self.replacements[hook.name]()
            self._installed = True

    def is_installed(self) -> bool:
        """Whether `install` has replaced vLLM's names in this process."""
        return self._installed

    def place(self, name: str) -> None:
        """Put the registered replacement in the place of a name, unless it is there."""
        owner_name, _, attribute = name.rpartition(".")
        owner = resolve(owner_name)
        original = getattr(owner, attribute)
        if not is_ours(original):
            setattr(owner, attribute, _wrap(original, self.replacements[name]))

    def faults(self) -> list[str]:
        """One sentence for all in which the installed vLLM differs from the tested releases."""
        if version := version_fault():
            return [version]
        try:
            self.load()
        except (ImportError, AttributeError) as error:
            return [f"vLLM {installed_release()} has not every name that is needed ({error})."]
        faults = map(fault_of, self.hooks.values())
        return [fault for fault in faults if fault is not None]

    def load(self) -> None:
        """Import the modules that register names; raises if vLLM lacks what they need."""
        for module in self._modules:
            importlib.import_module(f"{self._package}.{module}")


def _wrap(original, replacement: Callable) -> Callable:
    @functools.wraps(original)
    def call(*args, **kwargs):
        return replacement(original, *args, **kwargs)

    setattr(call, _MARK, True)
    return call


def is_ours(function) -> bool:
    """Whether a function, or one that it wraps by functools.wraps, is a replacement of ours."""
    while function is not None:
        if _MARK in getattr(function, "__dict__", {}):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def in_place(hook: Hook) -> bool:
    """Whether a "replaced" name still leads to our replacement."""
    return is_ours(resolve(hook.name))


def version_fault() -> str | None:
    """One sentence where the installed vLLM is of an unverified release, None otherwise."""
    release = installed_release()
    if release in TESTED:
        return None
    known = ", ".join(f"{known}.*" for known in TESTED)
    return (
        f"vLLM {release} is unverified, method 'hsd' was tested with {known}: install one of them, "
        "or a vllm-hsd that knows it."
    )


def installed_release() -> str:
    """Major and minor number of the installed vLLM, as in "0.32"."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def fault_of(hook: Hook) -> str | None:
    """One sentence on how a name differs from the tested releases, None if it does not."""
    if installed_release() in hook.missing:
        return None
    try:
        found = resolve(hook.name)
    except (ImportError, AttributeError) as error:
        return f"{hook.name} is not there ({error})."
    if hook.parameters is None:
        return None
    parameters = " ".join(inspect.signature(inspect.unwrap(found)).parameters)
    tested = (hook.parameters,) if isinstance(hook.parameters, str) else hook.parameters
    if parameters not in tested:
        expected = " or ".join(f"({each.replace(' ', ', ')})" for each in tested)
        return f"{hook.name} takes ({parameters.replace(' ', ', ')}), not {expected}."
    return None
