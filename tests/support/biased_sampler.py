"""Target samplers with one error each: the distribution tests must reject them."""

from functools import partial

from vllm_hsd.tools.audit import mutants
from vllm_hsd.tools.audit.mutants import replace

# What each does stands there. What `vllm_hsd.host.hooks:install` replaces later mends some.
unscored_grammar_cut, unsubtracted, no_cap, neighbouring_noise = (
    partial(mutants.install, None, name)
    for name in ("unscored grammar cut", "unsubtracted", "no cap", "neighbouring noise")
)


def install_generous_ratio() -> None:
    """Accept by a ratio that is 1.6 times too large."""
    from benchmarks.gpu import faults

    faults.install_generous(ratio=1.6)


def install_drafts_of_other_rows() -> None:
    """Draw the lowest level's tokens from flatter rows than those that are kept with them."""

    def sample_row(right, logits, *args, level, **options):
        token_ids, lse = right(logits, *args, level=level, **options)
        if level == 0:
            options["thresholds"] = None
            token_ids, _ = right(logits * 0.3, *args, level=level, **options)
        return token_ids, lse

    replace("vllm_hsd.cascade.program:sample_row", sample_row)


def noise_met_twice() -> None:
    """Draw two neighbours of a seeded request alike."""

    def alike(verify, *arguments, positions, **options):
        return verify(*arguments, positions=positions // 2, **options)

    replace("vllm_hsd.host.sampler:verify_chain_padded", alike)
