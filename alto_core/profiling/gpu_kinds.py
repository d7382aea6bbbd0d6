"""GPUs by name, for estimates about machines that are not here: memory, and the rate of half-precision products."""

from __future__ import annotations

from dataclasses import dataclass

from alto_core.errors import TaskFileError
from alto_core.scheduling.memory_model import ModelShape
from alto_core.scheduling.prediction import PassSpeed

CONTEXT_BYTES = 700 * 2**20
"""What driver and libraries take of a GPU before the first tensor."""
COMPUTE_SHARE = 0.6
"""Of a GPU's matrix rate that a training step reaches; an H200 gave 0.57 to 0.77 from 3,000 tokens a pass on."""
LAYER_SECONDS = 0.25e-3
"""What a decoder layer takes however few tokens a pass has; measured on an H200."""
FLOPS_PER_PARAMETER = 4
"""Of a token: forward, and the gradient of the inputs; a frozen weight has no gradient of its own."""


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """One kind of GPU."""

    name: str
    num_bytes: int
    teraflops: float
    """Dense, half precision, from the vendor's data sheet."""

    @property
    def free_bytes(self) -> int:
        return self.num_bytes - CONTEXT_BYTES

    def speed(self, shape: ModelShape) -> PassSpeed:
        """Expected of a model, by arithmetic."""
        return PassSpeed(
            base_seconds=LAYER_SECONDS * shape.num_layers,
            seconds_per_token=FLOPS_PER_PARAMETER * shape.num_parameters / (COMPUTE_SHARE * self.teraflops * 1e12),
        )


GPU_KINDS = {
    name: GpuKind(name=name, num_bytes=round(gib * 2**30), teraflops=teraflops)
    for name, gib, teraflops in (
        ("t4-16", 15.0, 65),
        ("a10-24", 22.5, 125),
        ("l4-24", 22.5, 121),
        ("rtx4090-24", 23.6, 165),
        ("rtx5090-32", 31.4, 210),
        ("a100-40", 39.5, 312),
        ("l40s-48", 44.6, 362),
        ("a100-80", 79.2, 312),
        ("h100-80", 79.2, 989),
        ("h200-141", 139.8, 989),
        ("b200-180", 178.0, 2250),
    )
}
"""Memory as the driver reports it, a little below the name."""


def gpu_kind(name: str) -> GpuKind:
    """A kind by its name.

    Raises:
        TaskFileError: there is no such kind; lists those there are.
    """
    kind = GPU_KINDS.get(name.lower())
    if kind is None:
        raise TaskFileError("--gpu", got=name, expected=f"one of {', '.join(GPU_KINDS)}")
    return kind
