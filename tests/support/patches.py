"""Replacing what other modules have defined, in the process of an engine or a server."""

import functools
import pkgutil
from collections.abc import Callable


def replace(target: str, patch: Callable) -> None:
    """Put `patch`, whose first argument is what it replaces, in the place of "module:name"."""
    module, _, path = target.partition(":")
    above, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(f"{module}:{above}")
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def call(*args, **kwargs):
        return patch(whole, *args, **kwargs)

    setattr(owner, name, call)
