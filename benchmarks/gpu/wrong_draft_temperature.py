"""A fault for the V2 runner: the verifier takes drafts for colder than they were drawn.

Not a fault would be to take them for certain: that is lossless for any draft that does not depend
on the verifier's uniforms.
"""

COLDER = 10.0


def install(setattr=setattr) -> None:
    """Divide the drafts' temperature, for stock drafters and cascades."""
    from vllm_hsd.runner_v2 import sampler

    for verifier in (sampler.BlockRejectionSampler, sampler.CascadeRejectionSampler):
        setattr(verifier, "drafts", _colder(verifier.drafts))


def _colder(right):
    def drafts(self, draft_logits, idx_mapping):
        found = right(self, draft_logits, idx_mapping)
        colder = found["draft_temperature"] / COLDER
        return {**found, "draft_temperature": colder, "draft_lse": None}

    return drafts
