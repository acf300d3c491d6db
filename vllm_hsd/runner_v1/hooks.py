"""Registry of every vLLM name that this package replaces, overrides or reads.

Replacements register themselves with `@replaces` (one function or method of vLLM) or
`@replaces_on_runner` (a method of one model runner); `vllm_names.py` lists what is only overridden
or read. `install` compares all of them with the installed vLLM and then replaces all or nothing.

A replacement takes the replaced function as its first argument. Nothing is replaced before a
configuration asks for it, except the one function that reads configurations (see plugin.py).
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from vllm_hsd.errors import UserError

TESTED = ("0.32",)
# Releases with the same names and parameters in which nothing was run.
COMPARED = ("0.33",)

How = Literal["replaced", "changed", "on runner", "overridden", "read", "read late"]

# Modules whose import fills the registry, in the order in which their replacements are made.
_MODULES = (
    "vllm_names",
    "replacements",
    "on_runner",
    "metrics",
    "spec_config",
    "stock_config",
    "proposer",
    "adaptive",
    "sampler",
    "level_checks",
    "levels",
    "stock_drafters",
)

# Drafters of vLLM's V1 runner under which block verification was tested.
STOCK_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp", "ngram", "suffix")

NO_PLUGIN_API = "vLLM has a plugin interface for drafters that run models on the V1 runner"

# Attribute of a function that replaces one of vLLM's. Not `__wrapped__`: every plugin sets that.
_MARK = "__vllm_hsd__"


@dataclass(frozen=True)
class Hook:
    """One name of vLLM that this package depends on.

    Attributes:
        name: module and attribute path.
        how: "replaced" in its class or module; "changed" in place; "on runner" replaced on one
            runner instance; "overridden" in a subclass of ours; "read" from an instance or called;
            "read late" once a level needs it (n-gram levels load numba, after which vLLM 0.32
            cannot import Triton kernels).
        why: purpose of the dependency.
        parameters: parameter names in order; None for what is not a function.
        issue: vLLM issue or pull request about it, if there is one.
        until: when the dependency can go.
        tested: releases in which it was tested.
    """

    name: str
    how: How
    why: str
    parameters: tuple[str, ...] | None = None
    issue: str = ""
    until: str = ""
    tested: tuple[str, ...] = TESTED


HOOKS: dict[str, Hook] = {}
_replacements: dict[str, Callable] = {}
_installed = False
_lock = threading.RLock()


def register(hook: Hook) -> None:
    """Add a name to the registry.

    Raises:
        ValueError: the name is there already.
    """
    if hook.name in HOOKS:
        raise ValueError(f"'{hook.name}' is registered twice")
    HOOKS[hook.name] = hook


def replaces(
    name: str, parameters: tuple[str, ...] | None, *, why: str, until: str = "", issue: str = ""
) -> Callable[[Callable], Callable]:
    """Register the decorated function as the replacement of a function or method of vLLM.

    The decorated function is called as f(original, *arguments).
    """
    return _registered(Hook(name, "replaced", why, parameters, issue, until))


def changes(name: str, *, why: str, until: str = "") -> Callable[[Callable], Callable]:
    """Register the decorated function, which `install` calls, as one that changes a name."""
    return _registered(Hook(name, "changed", why, until=until))


def replaces_on_runner(
    name: str, parameters: tuple[str, ...], *, why: str, until: str = "", issue: str = ""
) -> Callable[[Callable], Callable]:
    """Like `replaces`, for a method of one runner; called as f(original, proposer, *arguments)."""
    return _registered(Hook(name, "on runner", why, parameters, issue, until))


def _registered(hook: Hook) -> Callable[[Callable], Callable]:
    def decorate(replacement: Callable) -> Callable:
        register(hook)
        _replacements[hook.name] = replacement
        return replacement

    return decorate


def install() -> None:
    """Replace and change all registered names of vLLM; does nothing when called again.

    Raises:
        UserError: the installed vLLM differs; nothing was replaced.
    """
    global _installed
    with _lock:
        if _installed:
            return
        if found := faults():
            raise UserError(f"vllm-hsd cannot run: {found[0]}")
        for hook in HOOKS.values():
            if hook.how == "replaced":
                place(hook.name)
            elif hook.how == "changed":
                _replacements[hook.name]()
        _installed = True


class NeedsHooks:
    """Base of configurations that install the hooks in every process that receives them."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        install()


def is_installed() -> bool:
    """Whether `install` has replaced vLLM's names in this process."""
    return _installed


def place(name: str) -> None:
    """Put the registered replacement in the place of a name, unless it is there."""
    owner_name, _, attribute = name.rpartition(".")
    owner = resolve(owner_name)
    original = getattr(owner, attribute)
    if not is_ours(original):
        setattr(owner, attribute, _wrap(original, _replacements[name]))


def install_on_runner(runner, proposer) -> None:
    """Replace the methods of one runner that are registered as "on runner"."""
    for hook in HOOKS.values():
        if hook.how == "on runner":
            attribute = hook.name.rpartition(".")[2]
            bound = functools.partial(_replacements[hook.name], getattr(runner, attribute))
            setattr(runner, attribute, functools.partial(bound, proposer))


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


def faults() -> list[str]:
    """One sentence for everything in which the installed vLLM differs from the tested releases."""
    if version := version_fault():
        return [version]
    try:
        load()
    except (ImportError, AttributeError) as error:
        return [f"vLLM {installed_release()} has not every name that is needed ({error})."]
    early = (hook for hook in HOOKS.values() if hook.how != "read late")
    return [fault for hook in early if (fault := fault_of(hook)) is not None]


def load() -> None:
    """Import the modules that register names.

    Raises:
        ImportError or AttributeError: they need a name that the installed vLLM does not have.
    """
    for module in _MODULES:
        importlib.import_module(f"vllm_hsd.runner_v1.{module}")


def version_fault() -> str | None:
    """One sentence where the installed vLLM is of an unknown release, None otherwise."""
    release = installed_release()
    if release in (*TESTED, *COMPARED):
        return None
    known = ", ".join(f"{known}.*" for known in (*TESTED, *COMPARED))
    return f"vLLM {release} is not supported by this version of vllm-hsd: install one of {known}."


def installed_release() -> str:
    """Major and minor number of the installed vLLM, as in "0.32"."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def fault_of(hook: Hook) -> str | None:
    """One sentence on how a name differs from the tested releases, None if it does not."""
    if hook.parameters is None:
        return None if _is_there(hook.name) else f"{hook.name} is not there."
    try:
        found = inspect.unwrap(resolve(hook.name))
    except (ImportError, AttributeError) as error:
        return f"{hook.name} is not there ({error})."
    parameters = tuple(inspect.signature(found).parameters)
    if parameters != hook.parameters:
        return f"{hook.name} takes ({', '.join(parameters)}), not ({', '.join(hook.parameters)})."
    return None


def resolve(name: str) -> Any:
    """Object with a dotted name of module and attributes.

    Raises:
        AttributeError or ImportError: there is none.
    """
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"no module in '{name}'")


def _is_there(name: str) -> bool:
    """Whether a class has an attribute, by itself or on its instances; or a module a member."""
    owner_name, _, attribute = name.rpartition(".")
    try:
        owner = resolve(owner_name)
    except (ImportError, AttributeError):
        return False
    if hasattr(owner, attribute):
        return True
    return inspect.isclass(owner) and any(
        attribute in vars(cls).get("__annotations__", ())
        or any(_assigns(function, attribute) for function in _functions(cls))
        for cls in owner.__mro__
    )


def _functions(cls: type) -> Iterator[Any]:
    for member in vars(cls).values():
        function = inspect.unwrap(member) if callable(member) else member
        if inspect.isfunction(function):
            yield function
            # What vLLM's decorators of classes replace, they keep in a closure.
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            yield from filter(inspect.isfunction, cells)


def _assigns(function: Any, attribute: str) -> bool:
    code = function.__code__
    return attribute in code.co_names and any(
        step.opname == "STORE_ATTR" and step.argval == attribute
        for step in dis.get_instructions(code)
    )
