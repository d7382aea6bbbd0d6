"""How long a search may go on: in seconds, or in steps when the same answer is wanted on every machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

STEPS_PER_SECOND = 300_000
"""Steps of a search that count as one second when time is not to matter; an idle core makes more."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """A limit that starts to run when it is made."""

    seconds: float
    reproducible: bool = False
    """Count steps instead of seconds, and use one worker: a replay gives the same plan."""
    started: float = field(default_factory=time.monotonic)

    def spent(self, steps: int) -> float:
        """Share of the limit that is used up, after so many steps of the search."""
        if self.seconds <= 0:
            return 1.0
        if self.reproducible:
            return steps / (self.seconds * STEPS_PER_SECOND)
        return (time.monotonic() - self.started) / self.seconds
