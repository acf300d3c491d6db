"""Target samplers with one error each: the distribution tests must reject them."""

import bisect
import itertools

import numpy as np
from oracle.biased_rules import uncapped_final_ratio

from vllm_hsd.lossless import mutants
from vllm_hsd.verify.inputs import ChainBatch


def install_plain_bonus() -> None:
    """Do not score the first token that a grammar cuts off a draft."""
    mutants.install(None, "unscored grammar cut")


def install_plain_recovery() -> None:
    """Draw recovered tokens from the target: wrong even where drafts have one token."""
    from vllm_hsd.runner_v1 import sampler

    whole = sampler.verify_batch

    def verify_batch(batch, *args, **kwargs):
        return whole(_NothingSubtracted(**vars(batch)), *args, **kwargs)

    sampler.verify_batch = verify_batch


class _NothingSubtracted(ChainBatch):
    def subtract_draft(self, rows, requests, t) -> None:
        pass


def install_generous_ratio() -> None:
    """Accept by a ratio that is 1.6 times too large."""
    from vllm_hsd.verify import chain

    whole = chain.probability_ratios
    chain.probability_ratios = lambda target, draft: 1.6 * whole(target, draft)


def install_uncapped_final_ratio() -> None:
    """Accept whole drafts with their uncapped joint ratio."""
    from vllm_hsd.runner_v1 import sampler

    sampler.verify_batch = verify_batch


def install_drafts_of_other_rows() -> None:
    """Draw the lowest level's tokens from flatter rows than those that are kept with them."""
    from vllm_hsd.core import verified

    class FlatterCDF(verified.BlockedCDF):
        def __init__(self, probs):
            flatter = probs**0.3
            super().__init__(flatter / flatter.sum(-1, keepdim=True))

    verified.BlockedCDF = FlatterCDF


def verify_batch(batch: ChainBatch, method: str, uniforms: np.ndarray, *, target_ok):
    """Replacement of `vllm_hsd.verify.chain.verify_batch`, one request after the other."""
    assert method == "block" and target_ok.all()
    draws = iter(uniforms.tolist())
    token_ids = np.full((batch.size, batch.tokens.shape[1] + 1), -1)
    accepted = np.zeros(batch.size, dtype=np.int64)
    for i, n in enumerate(batch.lengths):
        ids = batch.tokens[i, :n].tolist()
        p = batch.target_probs[batch.target_rows[i, : n + 1]].tolist()
        q = batch.draft_probs[batch.draft_rows[i, :n]].tolist() if n else []
        tau, recovered = uncapped_final_ratio(
            p, q, ids, lambda h: next(draws) < h, lambda w: _draw(w, next(draws))
        )
        token_ids[i, :tau], token_ids[i, tau], accepted[i] = ids[:tau], recovered, tau
    return token_ids, accepted


def _draw(weights, uniform: float) -> int:
    sums = list(itertools.accumulate(weights))
    return min(bisect.bisect_right(sums, uniform * sums[-1]), len(sums) - 1)


def noise_of_the_next_position() -> None:
    """Draw each token of a seeded request with the noise of the token after it."""
    from vllm_hsd.runner_v1.noise import RequestNoise

    at = RequestNoise.at
    RequestNoise.at = lambda self, offset: at(self, offset + 1)


def noise_met_twice() -> None:
    """Keep the noise of the token after the accepted draft for the next one."""
    from vllm_hsd.runner_v1.noise import RequestNoise

    emitted = RequestNoise.emitted
    RequestNoise.emitted = lambda self, count: emitted(self, count - 1)
