"""Options for tests: what an order, a race, a wrong address or a forgotten write would change.

Serving uses none of them. `TRITON_CPU_CHECKS` sets them before kernels are compiled, as in
"bounds,order=7,threads=2"; bounds are compiled in, the others may be changed between launches.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass
class Checks:
    """
    Attributes:
        bounds: raise IndexError for an access outside of the tensor that was passed for its
            pointer; arrays of programs begin with poison in place of zeros.
        order: seed of the random order in which the programs of a launch run; None: ascending.
        threads: how many of them run at a time.
    """

    bounds: bool = False
    order: int | None = None
    threads: int = 1

    @classmethod
    def parse(cls, text: str) -> Checks:
        """Checks written as "bounds,order=7,threads=2".

        Raises:
            ValueError: a part has another form.
        """
        found = cls()
        for part in filter(None, text.split(",")):
            key, _, value = part.partition("=")
            if key == "bounds" and not value:
                found.bounds = True
            elif key in ("order", "threads") and value.isdecimal():
                setattr(found, key, int(value))
            else:
                raise ValueError(
                    f"TRITON_CPU_CHECKS has '{part}': write bounds, order=SEED or threads=COUNT, "
                    "separated by commas."
                )
        return found

    def any(self) -> bool:
        return self != Checks()


ACTIVE = Checks.parse(os.environ.get("TRITON_CPU_CHECKS", ""))
