"""How busy others keep the machine: on a shared one, a measurement says little without it."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import usable_cores

_STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Moment:
    """Processor seconds used so far by everybody (None where the system does not say) and by this
    process, and the time."""

    everybody: float | None
    own: float
    time: float

    @staticmethod
    def now() -> Moment:
        """This moment."""
        everybody = None
        if _STAT.exists():
            # user, nice, system, idle, iowait, irq, softirq, steal: in ticks, since the start
            ticks = [int(number) for number in _STAT.read_text().split("\n")[0].split()[1:9]]
            everybody = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return Moment(everybody, time.process_time(), time.monotonic())

    def others_since(self) -> float | None:
        """The share of all cores that others have used since this moment, 0 to 1."""
        now = Moment.now()
        if self.everybody is None or now.everybody is None:
            return None
        others = (now.everybody - self.everybody) - (now.own - self.own)
        elapsed = max(now.time - self.time, 1e-9)
        return round(min(1.0, max(0.0, others / elapsed / usable_cores())), 3)


def wait_until_quiet(*, at_most: float, share: float = 0.05, watch: float = 2.0) -> None:
    """Returns when others have used less than `share` of the cores for `watch` seconds, or after
    `at_most` seconds."""
    end = time.monotonic() + at_most
    while time.monotonic() < end:
        start = Moment.now()
        time.sleep(watch)
        others = start.others_since()
        if others is None or others < share:
            return
