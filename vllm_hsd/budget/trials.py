"""When an option that does not seem to pay is tried again: estimates of it are old, or missing."""

from __future__ import annotations

import numpy as np

from vllm_hsd.budget import constants


class Trials:
    """The first trial of an option is at once, if nothing is to be read for it.

    Args:
        options: how many there are.
        steps: of a trial.

    Attributes:
        idle: [options] int64 steps since the option paid, or since its last trial.
        pause: [options] int64 such steps before the next trial.
        ended: [options] int64 trials so far.
    """

    def __init__(self, options: int, steps: int = constants.TRIAL_STEPS) -> None:
        self.steps = steps
        self.idle, self.pause, self.ended = np.zeros((3, options), dtype=np.int64)

    def pays(self, option: int) -> None:
        """Note that the option is used in this step for what it is expected to gain."""
        self.idle[option], self.pause[option] = 0, constants.FIRST_PAUSE

    def due(self, option: int, reading: float = 0.0, drafts: float = 0.0) -> bool:
        """Whether the option is used in this step although it does not pay; a step has passed.

        Args:
            reading: tokens that each request would get while what was missed is read.
            drafts: and while a trial's drafts are made, for which the first trial does not wait.
        """
        self.idle[option] += 1
        cost = reading + drafts if self.ended[option] else reading
        pause = max(self.pause[option], int(cost / constants.TRIAL_SHARE))
        idle = self.idle[option] - pause
        if idle >= self.steps:
            self.idle[option] = 0
            self.ended[option] += 1
            self.pause[option] = np.clip(2 * pause, constants.FIRST_PAUSE, constants.LONGEST_PAUSE)
        return bool(idle > 0)

    def wait(self, option: int) -> None:
        """A step without a plan has passed: it counts for the pause, not for a trial."""
        self.idle[option] += self.idle[option] < self.pause[option]

    def takes_part(self, option: int, count: int) -> np.ndarray:
        """[count] bool, the one of so many requests that an option that is due is tried on.

        One tells enough, and costs little also where a batch makes every token dear.
        """
        # The same one in all steps of a trial, another in the next.
        taken: np.ndarray = np.arange(count) == self.ended[option] % max(count, 1)
        return taken


class Searches:
    """Whether lookups search: where that costs more than it gains, only now and then.

    A search tells by itself what it would gain, without a draft, so the pauses are short.
    """

    def __init__(self) -> None:
        # By batch size: tokens gained and their price, of the last searches.
        self.known: dict[int, tuple[float, float]] = {}
        # Searches of one size tell nothing of another, and do not put them off.
        self.pauses: dict[int, int] = {}

    def due(self, size: int) -> bool:
        """Whether lookups search in this step, of a batch of about this size; a step has passed."""
        gained, cost = self.known.get(size, (0.0, 0.0))
        if gained >= cost or not self.pauses[size]:
            return True
        self.pauses[size] -= 1
        return False

    def observe(self, size: int, requests: int, gained: float, cost: float) -> None:
        """Take in a search: tokens gained above the price of verifying them, and its own price."""
        # A new size is taken to pay until enough requests were searched for.
        before = self.known.get(size, (cost / (1 - constants.MEMORY) / requests, 0.0))
        own, price = (constants.MEMORY * each for each in before)
        self.known[size] = own + gained, price + cost
        self.pauses[size] = constants.SEARCH_PAUSE
