"""How much a plan may cost, and how long a search may go on: in seconds, or in steps when every machine is to agree."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

STEPS_PER_SECOND = 300_000
"""Steps of a search that count as one second when time is not to matter; an idle core makes more."""


@dataclass(frozen=True, kw_only=True)
class PlannerOptions:
    """How much to spend on a plan."""

    seconds: float = 2.0
    """For all searches together; 0 takes the best list schedule."""
    gap: float = 0.005
    """A plan proven to be within this share of the best one is good enough."""
    slack: float = 0.0
    """The longest-first list is taken unless another plan ends earlier by more than this share."""
    num_workers: int = 2
    """Threads of CP-SAT."""
    seed: int = 0
    reproducible: bool = False
    """Limit the searches by counted work instead of seconds: the same plan on every machine."""


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
