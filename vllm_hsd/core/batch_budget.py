"""One draft length for all requests of a step, or none where that is faster, learned while serving.

`core.draft_budget` for runners that schedule one draft length for a whole batch, and of whose steps
only the time as a whole is known. It looks only at times, at batch sizes and at what became of
earlier drafts, so the text stays lossless.
"""

from __future__ import annotations

from vllm_hsd.core.acceptance import PRIOR_TOKENS, REMEMBERED
from vllm_hsd.core.step_times import StepTimes
from vllm_hsd.core.trials import TRIAL_STEPS, Trials


class BatchBudget:
    """Chooses between drafts of `draft_length` tokens and none, by the size of the batch.

    Args:
        draft_length: tokens of a draft.
        max_batch: most requests of a step.

    Attributes:
        times: seconds of steps without and with drafts, by requests.
        drafts, emitted: verified drafts and the tokens that these steps emitted; older ones fade.
    """

    def __init__(self, draft_length: int, max_batch: int) -> None:
        self.draft_length = draft_length
        self.times = StepTimes(max_batch), StepTimes(max_batch)
        self.drafts = self.emitted = 0.0
        # Two options for each power of two of requests, all of which a trial is made on.
        self.trials = Trials(2 * max_batch.bit_length() + 2, TRIAL_STEPS - 2)

    def choose(self, size: int) -> int:
        """Tokens to draft for each of `size` requests: `draft_length` or 0."""
        speedup = self.speedup(size)
        pays = speedup is None or speedup > 1
        option = 2 * size.bit_length()
        self.trials.pays(option + pays)
        if self.trials.due(option + (not pays)):
            pays = not pays
            # What a trial finds is to outweigh what was known before.
            self._fade(PRIOR_TOKENS)
        return self.draft_length if pays else 0

    def observe(self, size: int, drafted: bool, emitted: int, seconds: float) -> None:
        """Take in a step in which every request decoded.

        Args:
            size: requests.
            drafted: a whole draft of each of them was verified, and another one made; or neither.
            emitted: tokens of all requests.
            seconds: of the step.
        """
        self.times[drafted].observe(size, seconds)
        if drafted:
            self.drafts += size
            self.emitted += emitted
            self._fade(REMEMBERED)

    def speedup(self, size: int) -> float | None:
        """Tokens per second with drafts over those without; None before both were seen."""
        plain, drafting = self.times
        if not self.drafts or plain.empty:
            return None
        return self.emitted / self.drafts * plain.seconds(size) / drafting.seconds(size)

    def _fade(self, most: float) -> None:
        """Let no more than `most` drafts count."""
        keep = most / max(self.drafts, most)
        self.drafts, self.emitted = keep * self.drafts, keep * self.emitted
