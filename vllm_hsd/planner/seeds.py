"""What adaptive drafting starts from: the times and acceptance of a profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from vllm_hsd.config import CascadeConfig
from vllm_hsd.core.cascade import Cascade
from vllm_hsd.core.step_times import StepTimes
from vllm_hsd.errors import UserError, quoted
from vllm_hsd.levels import LevelConfig, Verifier
from vllm_hsd.planner.latencies import Latencies, Role
from vllm_hsd.planner.profile import Profile, environment_warnings, load_profile, place
from vllm_hsd.planner.survival import Acceptance

# Kinds that `vllm-hsd profile` does not measure.
_NOT_MEASURED = ("suffix", "ngram_model", "eagle3", "first_of")


def check_seeds(hsd: CascadeConfig, target: str) -> list[str]:
    """Check the profile that a configuration names.

    Args:
        hsd: the configuration; `adaptive` names a profile.
        target: path or name of the model that is served.

    Returns:
        one sentence for each way in which the profile was measured elsewhere.

    Raises:
        UserError: not a profile, one without latencies, or one that lacks a level; names the key
            and the file.
    """
    profile = _profile(hsd)
    for i, level in enumerate(hsd.levels):
        if level.kind not in _NOT_MEASURED and _candidate(profile, level) is None:
            measured = ", ".join(candidate.name for candidate in profile.candidates)
            raise UserError(
                f"adaptive.profile {quoted(_path(hsd))} has no candidate like levels[{i}]."
                f"{level.kind} {quoted(getattr(level, level.kind))}, only {quoted(measured)}: "
                "profile this level too, or remove the key."
            )
    warnings = environment_warnings(profile)
    if place(profile.target) != place(target):
        warnings.insert(
            0,
            f"the profile was measured for {profile.target} and this is {target}: both may differ.",
        )
    return [f"adaptive.profile {quoted(_path(hsd))}: {warning}" for warning in warnings]


def seed(hsd: CascadeConfig, selected: Sequence[int], cascade: Cascade) -> None:
    """Let a new cascade begin with the times and acceptance of the profile.

    Args:
        hsd: the configuration; `adaptive` names a profile.
        selected: numbers of the cascade's levels in it.
        cascade: that has seen nothing yet.

    Raises:
        UserError: see `check_seeds`.
    """
    profile = _profile(hsd)
    latencies, controller = profile.latencies, cascade.learning.controller
    assert latencies is not None
    _seed_times(cascade.learning.target_times, latencies, len(profile.candidates), "target")
    levels = [hsd.levels[i] for i in selected]
    drafters = [_candidate(profile, level) for level in levels]
    for k, drafter in enumerate(drafters):
        if drafter is None:
            continue
        looks_up = drafter in profile.lookups
        role: Role = "verify" if k else "lookup" if looks_up else "draft"
        _seed_times(cascade.learning.level_times[k], latencies, drafter, role)
        verifiers = [*drafters[k + 1 :], len(profile.candidates)]
        for above, verifier in enumerate(verifiers, k + 1):
            if controller is None or verifier is None:
                continue
            rule = hsd.drawn_verifier
            if above < len(levels):
                rule = cast(Verifier, levels[above].options(1, rule).verifier)
            length = min(cascade.options[k].draft_length, profile.max_draft_tokens)
            controller.acceptance.seed(
                controller.pair(k, above),
                *_survival(profile.acceptance(rule), verifier, drafter, length),
            )
    if controller is not None:
        controller.seeded = not any(times.empty for times in controller.level_times)


def _path(hsd: CascadeConfig) -> str:
    assert hsd.adaptive is not None and hsd.adaptive.profile is not None
    return hsd.adaptive.profile


def _profile(hsd: CascadeConfig) -> Profile:
    try:
        profile = load_profile(_path(hsd))
    except UserError as error:
        raise UserError(f"adaptive.{error}") from None
    if profile.latencies is None:
        raise UserError(
            f"adaptive.profile {quoted(_path(hsd))} holds no latencies: run `vllm-hsd profile` "
            "without --skip-timing."
        )
    return profile


def _candidate(profile: Profile, level: LevelConfig) -> int | None:
    """Index of the candidate that drafts as `level` does."""
    for i, candidate in enumerate(profile.candidates):
        ours, theirs = (getattr(x, level.kind, None) for x in (level, candidate.level))
        if place(ours) == place(theirs):
            return i
    return None


def _seed_times(times: StepTimes, latencies: Latencies, model: int, role: Role) -> None:
    """Tell the times of one model's passes, each of which was measured."""
    table = latencies.forward[model]
    by_request = role in ("lookup", "draft")
    passes = {
        (batch, length): latencies.call(model, role, batch, length)
        for batch in table.batch_sizes
        for length in (table.tokens[:1] if by_request else table.tokens)
    }
    if role == "target" and latencies.plain is not None:
        passes |= {
            (b, 1): latencies.call(model, "plain", b, 1) for b in latencies.plain.batch_sizes
        }
    tokens = [batch * (1 if by_request else length) for batch, length in passes]
    times.seed(np.array(tokens), np.array(list(passes.values())) / 1e3)


def _survival(
    acceptance: Acceptance, verifier: int, drafter: int, length: int
) -> tuple[np.ndarray, float]:
    """[length + 1] P(at least t tokens accepted) of drafts that have any, and how many have."""
    joint = acceptance.lookups.get(drafter)
    if joint is None:
        alive = acceptance.survival[verifier, drafter, length, 0, : length + 1]
        # Tables are rounded: a probability may be a little above the one before.
        return np.minimum.accumulate(np.minimum(alive, 1.0)), 1.0
    # [m, k]: m tokens offered, k of them accepted; a token that was not offered is not rejected.
    table = joint[verifier, length, 0, : length + 1, : length + 1]
    filled = float(table[1:].sum())
    survival = np.ones(length + 1)
    for t in range(1, length + 1):
        offered = table[t:, t - 1 :].sum()
        kept = table[t:, t:].sum() / offered if offered > 0 else 1.0
        survival[t] = survival[t - 1] * kept
    return survival, min(filled, 1.0)
