"""What `vllm-hsd verify` is to verify, and what it found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_hsd.cli import greedy
from vllm_hsd.cli.bench_jobs import Comparison, Difference, Results
from vllm_hsd.lossless import sampled
from vllm_hsd.lossless.sampled import Setting, Texts
from vllm_hsd.lossless.seeded import Seeded
from vllm_hsd.lossless.statistics import Check

ANSWER_TOKENS = 64
# Tokens of every setting in the comparison of requests with seeds.
SEEDED_TOKENS = 1024
# Seed of the uniforms that make quantiles continuous.
SEED = 0
# Share of the draft that a drafter equal to the target may lose to rounding.
LARGEST_LOSS = {"float32": 1e-3}
LARGEST_LOSS_16_BIT = 0.05
# Largest gap of two logits that rounding may exchange, in nats.
LARGEST_GAP = {**greedy.LARGEST_GAP, "float32": 1e-4}


@dataclass(frozen=True)
class Verification:
    """What to verify.

    Attributes:
        comparison: the model with no speculation and with the configuration to verify.
        settings: sampling parameters of the sampled text; may be none.
        num_tokens: tokens of every setting.
        greedy: whether greedy text is compared.
        equal_drafter: whether the model is served as its own drafter too.
        servers: URLs of running servers with and without speculation, instead of engines.
        drafter: the model that a server drafts with, if it was named.
    """

    comparison: Comparison
    settings: list[Setting]
    num_tokens: int
    greedy: bool
    equal_drafter: bool
    servers: tuple[str, str] | None = None
    drafter: str | None = None


@dataclass
class Outcome:
    """What was found.

    Attributes:
        metadata: machine, versions, what was asked for.
        texts: sampled text.
        checks: of the sampled text.
        greedy_results: generations without (config 0) and with (config 1) speculation, and
            differences.
        dtype: of the model.
        equal_drafter: (drafted, accepted) with the model as its own drafter, None if not asked for.
        seconds: wall time by part.
        untested: sentences on what could not be tested.
        seeded: comparison of requests with seeds, None where the configuration promises nothing.
    """

    verification: Verification
    metadata: dict[str, Any]
    texts: Texts
    checks: list[Check]
    greedy_results: Results
    dtype: str
    equal_drafter: tuple[int, int] | None
    seconds: dict[str, float]
    untested: list[str] = field(default_factory=list)
    seeded: Seeded | None = None

    @property
    def failed_checks(self) -> list[Check]:
        return sampled.failures(self.checks)

    @property
    def unexplained(self) -> list[Difference]:
        """Greedy differences where the target's two best tokens do not nearly tie."""
        return [
            each for each in self.greedy_results.differences if not each.gap <= self.largest_gap
        ]

    @property
    def largest_gap(self) -> float:
        """Largest gap of two logits that rounding may exchange, in nats."""
        return LARGEST_GAP[self.dtype]

    @property
    def equal_drafter_failed(self) -> bool:
        if self.equal_drafter is None:
            return False
        drafted, accepted = self.equal_drafter
        bound = LARGEST_LOSS.get(self.dtype, LARGEST_LOSS_16_BIT)
        return not drafted or 1 - accepted / drafted > bound

    @property
    def lossless(self) -> bool:
        seeded = self.seeded is not None and self.seeded.unexplained
        return not (self.failed_checks or self.unexplained or self.equal_drafter_failed or seeded)
