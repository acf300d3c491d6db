"""A fault of the V2 runner: the target's noise is that of the neighbouring position."""


def install() -> None:
    """Replace what the sampler verifies with."""
    from vllm_hsd.runner_v2 import sampler

    verify = sampler.verify_chain_padded

    def shifted(*arguments, positions, **options):
        return verify(*arguments, positions=positions + 1, **options)

    sampler.verify_chain_padded = shifted
