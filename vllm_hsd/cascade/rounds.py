"""What a cascade tells its listeners: a draft, and what its verification made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_hsd.cascade.drafts import DraftStore
from vllm_hsd.cascade.level import LevelOptions
from vllm_hsd.cascade.stopping import EntropyThresholds


@dataclass
class Round:
    """A draft of some requests and its verification, as listeners of a cascade are told of it.

    A level's verification follows at once: one round tells everything. The target's comes a step
    later: one round with what was requested, and one with what was accepted.

    Attributes:
        level: the level that drafted.
        verifier: the level that verifies; the number of levels for the target.
        slots: [n] int64, the requests.
        drafts: where the drafts are.
        requested: [n] int64 tokens; None where an earlier round told.
        accepted: [n] int64 tokens; None before the target's verdict, and where a level passes them
            on unverified.
        thresholds: entropy thresholds of the requests; None before the verdict.
        computed: tokens of the verifier's forward pass; 0 for the target.
        drafting_seconds: with everything below the level.
        verifying_seconds: of the verifier; 0 for the target.
    """

    level: int
    verifier: int
    slots: np.ndarray
    drafts: DraftStore
    requested: np.ndarray | None = None
    accepted: np.ndarray | None = None
    thresholds: EntropyThresholds | None = None
    computed: int = 0
    drafting_seconds: float = 0.0
    verifying_seconds: float = 0.0


def move_thresholds(options: Sequence[LevelOptions], finished: Round) -> None:
    """Take in the entropies at the first rejected tokens of a round.

    Args:
        options: one per level.
        finished: the round; one without a verdict says nothing.
    """
    if finished.accepted is None or finished.thresholds is None:
        return
    drafts, slots, accepted = finished.drafts, finished.slots, finished.accepted
    rejected = accepted < drafts.counts[slots]
    place = (slots[rejected], accepted[rejected])
    for level, option in enumerate(options):
        own = drafts.level[place] == level
        if option.stopping == "entropy" and own.any():
            entropy = drafts.entropy[place][own]
            finished.thresholds.observe_rejection(level, slots[rejected][own], entropy)
