"""Frozen linear layers with their adapters, and the way to run those that share an input one after another.

The Triton kernels have a better way for several layers (`triton_lora`). This one serves every implementation that adds
the LoRA paths of one layer at a time.

Shape suffixes: see `segments`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from kernels.segments import Segments


@dataclass(frozen=True, kw_only=True, eq=False)
class Projection:
    """A frozen linear layer and its adapters."""

    weight: Tensor | Callable[[], Tensor]
    """[O, I] as torch stores it, the transposed view of a Conv1D's weight, or what unpacks a quantized one."""
    bias_O: Tensor | None
    a_RI: Tensor
    """Any float dtype. The compute dtype is fastest on Triton: float32 rows are converted by every tile that reads
    them."""
    b_RO: Tensor
    layer_index: int
    gradient_sinks: tuple[Tensor, Tensor]
    """float32 [R, I] and [R, O]; dA and dB go here. float64 with float64 inputs."""

    @property
    def weight_OI(self) -> Tensor:  # noqa: N802 - a shape suffix
        """The frozen weight; a quantized one is unpacked anew at each call, so that nobody keeps it."""
        return self.weight if isinstance(self.weight, Tensor) else self.weight()

    @property
    def d_out(self) -> int:
        """Width of the layer's output."""
        return (self.weight if isinstance(self.weight, Tensor) else self.b_RO.T).shape[0]


class OneLayer(Protocol):
    """What the modules `reference`, `torch_grouped` and `triton_lora` offer; `reference` says what it means."""

    def lora_forward_(
        self, base_TO: Tensor, x_TI: Tensor, a_RI: Tensor, b_RO: Tensor, segments: Segments, layer_index: int
    ) -> list[Tensor]: ...

    def lora_backward_(
        self,
        da_RI: Tensor,
        db_RO: Tensor,
        dy_TO: Tensor,
        x_TI: Tensor,
        a_RI: Tensor,
        b_RO: Tensor,
        segments: Segments,
        layer_index: int,
        shrunk: list[Tensor],
        *,
        input_needs_gradient: bool = True,
        accumulate: bool = True,
    ) -> Tensor | None: ...


def forward_one_by_one(
    implementation: OneLayer, x_TI: Tensor, projections: Sequence[Projection], segments: Sequence[Segments]
) -> tuple[tuple[Tensor, ...], list[list[Tensor]]]:
    """y [T, O] of each projection with its LoRA paths, and what each needs for the backward pass."""
    outputs, shrunk = [], []
    for p, own in zip(projections, segments, strict=True):
        y_TO = functional.linear(x_TI, p.weight_OI, p.bias_O)
        shrunk.append(implementation.lora_forward_(y_TO, x_TI, p.a_RI, p.b_RO, own, p.layer_index))
        outputs.append(y_TO)
    return tuple(outputs), shrunk


def backward_one_by_one(
    implementation: OneLayer,
    dy_TO: Sequence[Tensor],
    x_TI: Tensor,
    shrunk: Sequence[list[Tensor]],
    projections: Sequence[Projection],
    segments: Sequence[Segments],
    *,
    input_needs_gradient: bool,
    accumulate: bool,
) -> Tensor | None:
    """dx [T, I] of the frozen layers and the LoRA paths together; dA and dB go to the sinks."""
    dx_TI = None
    for dy, p, own, saved in zip(dy_TO, projections, segments, shrunk, strict=True):
        dx_lora_TI = implementation.lora_backward_(
            p.gradient_sinks[0],
            p.gradient_sinks[1],
            dy,
            x_TI,
            p.a_RI,
            p.b_RO,
            own,
            p.layer_index,
            saved,
            input_needs_gradient=input_needs_gradient,
            accumulate=accumulate,
        )
        if dx_lora_TI is not None:
            dx_TI = add_frozen_dx(dx_TI, dy, p).add_(dx_lora_TI)
    return dx_TI


def add_frozen_dx(dx_TI: Tensor | None, dy_TO: Tensor, projection: Projection) -> Tensor:
    """dx + dy W, in place where there is a dx."""
    return dy_TO @ projection.weight_OI if dx_TI is None else dx_TI.addmm_(dy_TO, projection.weight_OI)
