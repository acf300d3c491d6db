"""A fault for engines on the V2 runner: sampled drafts are verified as if they were certain."""


def install() -> None:
    from vllm_hsd.runner_v2.sampler import CascadeRejectionSampler

    CascadeRejectionSampler.draft_rows = lambda *args: None
