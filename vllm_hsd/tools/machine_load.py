"""What else the machine did during a measurement, and what that says about its figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil
from pydantic import BaseModel, ConfigDict

# Above these a figure is doubtful: cores that other processes used, share of time that the
# hypervisor took, difference between equal steps.
OTHERS = 0.1
STEAL = 0.02
DRIFT = 0.10


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores since the machine started: at work, taken by its hypervisor, in all."""

    busy: float
    steal: float
    total: float

    @staticmethod
    def now() -> CpuTimes:
        times = psutil.cpu_times()
        steal = getattr(times, "steal", 0.0)
        # Linux counts a guest's time in user and nice, too.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        return CpuTimes(total - idle - steal, steal, total)

    def load_until_now(self, seconds: float, cpu_seconds: float) -> tuple[float, float]:
        """Cores that processes other than the measured one used since this moment, and the share of
        the time that the hypervisor gave to other machines.

        Args:
            seconds: wall time of the measured process.
            cpu_seconds: its processor time.
        """
        now = CpuTimes.now()
        others = max(0.0, (now.busy - self.busy - cpu_seconds) / seconds)
        return others, (now.steal - self.steal) / max(now.total - self.total, 1e-9)


class MachineLoad(BaseModel):
    """Medians over a measurement; None where nothing was measured.

    Attributes:
        other_cores: cores that other processes used.
        steal: share of the processors' time that the hypervisor took.
        drift: difference between equal steps without speculation, (slowest - fastest) / fastest.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    other_cores: float | None = None
    steal: float | None = None
    drift: float | None = None

    @classmethod
    def of(
        cls, loads: Iterable[tuple[float, float]], equal_steps: Iterable[Sequence[float]]
    ) -> MachineLoad:
        """The medians.

        Args:
            loads: (cores that others used, share that was stolen) of every run.
            equal_steps: times of steps that should be the same; alone they show no drift.
        """
        found = list(loads)
        drifts = [max(same) / min(same) - 1 for same in equal_steps if len(same) > 1]
        return cls(
            other_cores=round(statistics.median(x for x, _ in found), 3) if found else None,
            steal=round(statistics.median(x for _, x in found), 4) if found else None,
            drift=round(statistics.median(drifts), 4) if drifts else None,
        )

    def sentences(self, on_host: bool = True) -> list[str]:
        """What makes the figures less trustworthy than they look, a sentence each.

        Args:
            on_host: whether the figures depend on the processors' cores, not on a GPU alone.
        """
        notes = []
        if on_host and (self.other_cores or 0) > OTHERS:
            notes.append(
                f"other processes used {self.other_cores:.1f} of {psutil.cpu_count()} cores "
                "meanwhile: measure again on a quiet machine."
            )
        if (self.steal or 0) > STEAL:
            notes.append(
                f"the hypervisor took {self.steal:.0%} of the processor time (steal): other "
                "machines on this host slowed all runs."
            )
        if (self.drift or 0) > DRIFT:
            notes.append(
                f"equal steps without speculation differ by {self.drift:.0%} between rounds: "
                "ratios below that are noise."
            )
        return notes
