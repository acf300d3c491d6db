"""Faults of the sampler: the target's noise is that of another position."""


def noise_of_the_next_position() -> None:
    """Every token is drawn as the one after it."""
    _read_at(lambda positions: positions + 1)


def noise_met_twice() -> None:
    """Two neighbours are drawn alike."""
    _read_at(lambda positions: positions // 2)


def _read_at(place) -> None:
    from vllm_hsd.host import sampler

    verify = sampler.verify_chain_padded

    def shifted(*arguments, positions, **options):
        return verify(*arguments, positions=place(positions), **options)

    sampler.verify_chain_padded = shifted
