"""Faults for the V2 runner: the verifier takes drafts for colder, or less likely, than they were.

Not a fault would be to take them for certain: that is lossless for any draft that does not depend
on the verifier's uniforms.
"""

import math

COLDER = 10.0
# On the acceptance ratio.
GENEROUS = 1.05


def install(setattr=setattr) -> None:
    """Divide the drafts' temperature, for stock drafters and cascades."""

    def changed(found):
        colder = found["draft_temperature"] / COLDER
        return {**found, "draft_temperature": colder, "draft_lse": None}

    _install(changed, setattr)


def install_generous(setattr=setattr) -> None:
    """Accept by a ratio that is slightly too large: about 2 % off for each drafted position."""

    def changed(found):
        lse = found["draft_lse"]
        return found if lse is None else {**found, "draft_lse": lse + math.log(GENEROUS)}

    _install(changed, setattr)


def _install(changed, setattr) -> None:
    from vllm_hsd.runner_v2 import sampler

    for verifier in (sampler.BlockRejectionSampler, sampler.CascadeRejectionSampler):
        setattr(verifier, "drafts", _changed(verifier.drafts, changed))


def _changed(right, changed):
    def drafts(self, draft_logits, idx_mapping):
        return changed(right(self, draft_logits, idx_mapping))

    return drafts
