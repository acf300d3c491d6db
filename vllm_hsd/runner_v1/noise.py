"""The noise with which vLLM's V1 sampler draws the tokens of a request, by position.

vLLM draws a token by an exponential race, and takes the noise for it from the generator of the
request: one draw for each token that is emitted. Whoever draws a token of the same position with
the same noise, a drafter or the target, draws what vLLM without speculation would draw from that
distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler


class RequestNoise:
    """A request's generator in the states before its next token, the one after it, and so on.

    Args:
        generator: the request's, in the state before its next token.
        skip: moves a generator past the noise of one token.
    """

    def __init__(
        self, generator: torch.Generator, skip: Callable[[torch.Generator], object]
    ) -> None:
        self.generator, self.skip = generator, skip
        self.ahead: list[torch.Generator] = []

    def at(self, offset: int) -> torch.Generator:
        """A generator in the state before token `offset` after the committed text, to be used."""
        return self._reach(offset).clone_state()

    def emitted(self, count: int) -> None:
        """`count` more tokens are committed: the request's generator moves past their noise."""
        self.generator.set_state(self._reach(count).get_state())
        del self.ahead[:count]

    def moved(self) -> None:
        """One more token is committed, drawn with the request's generator itself."""
        del self.ahead[:1]

    def _reach(self, offset: int) -> torch.Generator:
        if not self.ahead:
            self.ahead.append(self.generator.clone_state())
        while len(self.ahead) <= offset:
            after = self.ahead[-1].clone_state()
            self.skip(after)
            self.ahead.append(after)
        return self.ahead[offset]


def generators(noise: np.ndarray, offsets: Sequence[int]) -> list[torch.Generator | None]:
    """[n] generators for token offsets[i] after the committed text; None without noise[i]."""
    return [own and own.at(offset) for own, offset in zip(noise, offsets, strict=True)]


def skip_of(sampler: TopKTopPSampler, vocab_size: int) -> Callable[[torch.Generator], object]:
    """What `sampler` takes from a request's generator for one token of `vocab_size`."""
    # vLLM chooses between the two when it makes the sampler.
    if sampler.forward == sampler.forward_cpu and not sampler.use_fp64_gumbel:
        return lambda generator: torch.randint(
            0, 2**31, (1,), generator=generator, dtype=torch.long
        )
    dtype = torch.float64 if sampler.use_fp64_gumbel else torch.float32
    return lambda generator: torch.empty(
        vocab_size, dtype=dtype, device=generator.device
    ).exponential_(generator=generator)
