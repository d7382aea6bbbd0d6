"""What was measured of one model on one kind of device: a grid of passes, the fits to it, and costs beside passes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from alto_core.scheduling.memory_model import MemoryFit, PassSize
from alto_core.scheduling.prediction import PassSpeed, SideCosts


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One measured packing: its jobs in one pass."""

    num_jobs: int
    adapter_batch_size: int
    row_tokens: float
    """Mean length of its rows."""
    size: PassSize
    num_tokens: int
    """Without those that fill up the pass."""
    seconds: float
    """Of a whole joint step."""
    peak_bytes: int
    """Above backbone and slots."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The grid and the fits. Their residuals say how far to trust them."""

    points: tuple[GridPoint, ...]
    memory: MemoryFit
    speed: PassSpeed
    speed_residual: float
    """Largest distance of a measured step from the fit, as a share of its time."""
    profile_seconds: float
    """What it took to measure."""
    costs: SideCosts

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelProfile:
        fields = json.loads(text)
        points = tuple(GridPoint(**{**point, "size": PassSize(**point["size"])}) for point in fields["points"])
        return cls(
            **{
                **fields,
                "points": points,
                "memory": MemoryFit(**fields["memory"]),
                "speed": PassSpeed(**fields["speed"]),
                "costs": SideCosts(**fields["costs"]),
            }
        )
