"""Target samplers with one error each: the distribution tests must reject them."""

import bisect
import itertools

import numpy as np
import torch
from oracle.biased_rules import uncapped_final_ratio

from vllm_hsd.verify import VerifyResult


def install_plain_bonus() -> None:
    """Do not score the first token that a grammar cuts off a draft."""
    from vllm_hsd.runner_v1 import sampler

    class Drafts(sampler._Drafts):
        def __init__(self, *args):
            super().__init__(*args)
            kept = [ids[:n] for ids, n in zip(self._split(), self.scored, strict=True)]
            self.token_ids, self.counts = np.concatenate(kept), self.scored.copy()

        def _split(self):
            return np.split(self.token_ids, np.cumsum(self.counts)[:-1])

    sampler._Drafts = Drafts


def install_uncapped_final_ratio() -> None:
    """Accept whole drafts with their uncapped joint ratio."""
    from vllm_hsd.runner_v1 import sampler

    sampler.verify_chain = verify_chain


def verify_chain(target_probs, draft_probs, draft_token_ids, num_draft_tokens, *, method, uniforms):
    """Replacement of `vllm_hsd.verify.verify_chain`, one request after the other."""
    assert method == "block"
    if draft_probs is None:
        draft_probs = torch.zeros(0, target_probs.shape[1])
    p, q = target_probs.tolist(), draft_probs.tolist()
    draws, ids = iter(uniforms.tolist()), draft_token_ids.tolist()
    token_ids = np.full((len(num_draft_tokens), max(num_draft_tokens) + 1), -1)
    accepted = np.zeros(len(num_draft_tokens), dtype=np.int64)
    for i, n in enumerate(num_draft_tokens):
        tau, recovered = uncapped_final_ratio(
            p[: n + 1], q[:n], ids[:n], lambda h: next(draws) < h, lambda w: _draw(w, next(draws))
        )
        token_ids[i, :tau], token_ids[i, tau], accepted[i] = ids[:tau], recovered, tau
        p, q, ids = p[n + 1 :], q[n:], ids[n:]
    return VerifyResult(torch.from_numpy(token_ids), torch.from_numpy(accepted))


def _draw(weights, uniform: float) -> int:
    sums = list(itertools.accumulate(weights))
    return min(bisect.bisect_right(sums, uniform * sums[-1]), len(sums) - 1)
