"""One draft length for all requests of a step, or none where that is faster, learned while serving.

For runners that schedule one draft length for a whole batch. Like `core.controller`, it looks only
at times, at batch sizes and at what became of earlier drafts, so the text stays lossless.
"""

from __future__ import annotations

from vllm_hsd.core.step_times import StepTimes

# A trial of the other choice takes as many steps as give so many drafts, within bounds: the first
# one has no draft to verify. Pauses between trials, which double while the other choice loses.
_TRIAL_DRAFTS, _LEAST_STEPS, _MOST_STEPS = 16, 3, 8
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 2048
# Drafts after which one weighs half, and how many count when they are of long ago.
_HALF_LIFE, _KEPT = 500.0, 8.0
# A batch begins to draft for a gain of at least this much: estimates are noisy.
_HYSTERESIS = 1.03


class BatchDraftLength:
    """Chooses between drafts of `draft_length` tokens and none, by the size of the batch.

    Args:
        draft_length: tokens of a draft.
        max_batch: most requests of a step.

    Attributes:
        drafting, plain: seconds of steps with and without drafts, by requests.
        steps, emitted: verified drafts and the tokens that these steps emitted, exponentially
            forgotten.
    """

    def __init__(self, draft_length: int, max_batch: int) -> None:
        self.draft_length = draft_length
        self.drafting, self.plain = StepTimes(max_batch), StepTimes(max_batch)
        self.steps = self.emitted = 0.0
        self.drafts = True
        self.trial: bool | None = None
        self.trial_left = self.rested = 0
        self.pause = _FIRST_PAUSE
        self.tried: set[tuple[int, bool]] = set()

    def choose(self, size: int) -> int:
        """Tokens to draft for each of `size` requests: `draft_length` or 0."""
        if self.trial_left:
            self.trial_left -= 1
            return self._length(bool(self.trial))
        self.drafts = self._faster_with_drafts(size)
        if self.trial is not None:
            won = self.drafts == self.trial
            self.pause = _FIRST_PAUSE if won else min(2 * self.pause, _LONGEST_PAUSE)
            self.trial, self.rested = None, 0
        self.rested += 1
        other = not self.drafts
        if self.rested <= self.pause and not self._is_new(size, other):
            return self._length(self.drafts)
        if other and self.steps > _KEPT:
            self.emitted *= _KEPT / self.steps
            self.steps = _KEPT
        steps = min(max(_TRIAL_DRAFTS // size, _LEAST_STEPS), _MOST_STEPS)
        self.trial, self.trial_left = other, steps - 1
        return self._length(other)

    def observe(self, size: int, drafted: bool, emitted: int, seconds: float) -> None:
        """Take in a step in which every request decoded.

        Args:
            size: requests.
            drafted: a whole draft of each of them was verified, and another one made; or neither.
            emitted: tokens of all requests.
            seconds: of the step.
        """
        (self.drafting if drafted else self.plain).observe(size, seconds)
        if drafted:
            keep = 0.5 ** (size / _HALF_LIFE)
            self.steps = keep * self.steps + size
            self.emitted = keep * self.emitted + emitted

    def speedup(self, size: int) -> float | None:
        """Tokens per second with drafts over those without; None before both were seen."""
        if not self.steps or self.plain.empty:
            return None
        gained = self.emitted / self.steps
        return gained * self.plain.seconds(size) / self.drafting.seconds(size)

    def _faster_with_drafts(self, size: int) -> bool:
        speedup = self.speedup(size)
        return speedup is None or speedup > (1.0 if self.drafts else _HYSTERESIS)

    def _is_new(self, size: int, drafts: bool) -> bool:
        """Whether the time of batches of about this size has never been asked for."""
        key = size.bit_length(), drafts
        known = (self.drafting if drafts else self.plain).knows(size)
        if known or key in self.tried:
            return False
        self.tried.add(key)
        return True

    def _length(self, drafts: bool) -> int:
        return self.draft_length if drafts else 0
