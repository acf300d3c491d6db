"""Target samplers with one error each: the distribution tests must reject them."""

from vllm_hsd.host import hooks
from vllm_hsd.tools.audit import mutants


def install_plain_bonus() -> None:
    """Do not score the first token that a grammar cuts off a draft."""
    # What is installed later would mend it.
    hooks.install()
    mutants.install(None, "unscored grammar cut")


def install_plain_recovery() -> None:
    """Draw recovered tokens from the target: wrong even where drafts have one token."""
    mutants.install(None, "unsubtracted")


def install_generous_ratio() -> None:
    """Accept by a ratio that is 1.6 times too large."""
    from benchmarks.gpu import faults

    faults.install_generous(ratio=1.6)


def install_uncapped_final_ratio() -> None:
    """Accept whole drafts with their uncapped joint ratio."""
    mutants.install(None, "no cap")


def install_drafts_of_other_rows() -> None:
    """Draw the lowest level's tokens from flatter rows than those that are kept with them."""
    from vllm_hsd.cascade import program

    right = program.sample_row

    def sample_row(logits, *args, level, **options):
        token_ids, lse = right(logits, *args, level=level, **options)
        if level == 0:
            options["thresholds"] = None
            token_ids, _ = right(logits * 0.3, *args, level=level, **options)
        return token_ids, lse

    program.sample_row = sample_row


def install_noise_of_the_next_position() -> None:
    """Draw each token of a seeded request with the noise of the token after it."""
    mutants.install(None, "neighbouring noise")


def install_noise_met_twice() -> None:
    """Draw two neighbours of a seeded request alike."""
    from vllm_hsd.host import sampler

    verify = sampler.verify_chain_padded

    def alike(*arguments, positions, **options):
        return verify(*arguments, positions=positions // 2, **options)

    sampler.verify_chain_padded = alike
