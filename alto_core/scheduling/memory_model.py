"""How much memory a packing of jobs takes: arithmetic over the model's shape, corrected by a few measured steps.

    bytes = backbone + rank rows x adapted columns x bytes of an element in the slots
          + scale x (pass tokens x bytes per token + logits of one chunk) + fixed

The first line is exact. `scale` and `fixed` (graph pools, workspaces, slack of the allocator) are fitted: by arithmetic
alone they are 1 and 0. The paper's model, M = k0 + k1 x tokens, has no term for the adapters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ADAPTER_BYTES = 20
"""Of one adapter parameter in float32: parameter, gradient, two moments, best so far."""
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a parameter packed in 4 bits: the value, and its share of a scale of 8 bits and of that one's own scale."""
GATHERED_LAYERS = 3
"""Of a divided model: one computes, the next has arrived and is copied to its place."""
SCALE_LIMITS = (0.25, 4.0)
"""A fitted scale outside of this says that the measurements were disturbed; arithmetic is used then."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the arithmetic needs to know of a base model, its adapted layers and how they run."""

    num_parameters: int
    """Tied ones once."""
    element_bytes: int
    """Of a parameter and of an activation."""
    num_layers: int
    width: int
    query_width: int
    key_value_width: int
    """Of keys, and of values."""
    mlp_width: int
    mlp_inputs: int
    """Projections from the model's width into the MLP's: 2 with a gate, else 1."""
    vocabulary: int
    adapted_columns: int
    """Sum of input and output widths of all adapted layers: parameters of one rank row."""
    adapted_layers: int
    has_shadow: bool
    """Kernels read the adapters in the backbone's half precision; the slots hold a copy."""
    chunk_bytes: int
    """Most bytes of logits that exist at a time."""
    recomputed: Literal["none", "mlp", "layers"] = "none"
    """Parts that run again in backward instead of keeping their activations; they exist in one layer at a time."""
    layer_parameters: int = 0
    """Of the parameters, those of decoder layers, which ranks can divide among each other."""
    num_ranks: int = 1
    """That the decoder layers are divided over."""
    quantized_parameters: int = 0
    """Of the parameters, those that lie packed in 4 bits and are unpacked one layer at a time."""

    @property
    def backbone_bytes(self) -> int:
        """Of what one device holds of the model, and of the layers that it gathers."""
        if self.num_ranks == 1:
            unpacked = self.quantized_parameters / self.num_layers
            whole = self.num_parameters - self.quantized_parameters + unpacked
            return math.ceil(whole * self.element_bytes + self.quantized_parameters * NF4_BYTES)
        gathered = GATHERED_LAYERS * self.layer_parameters / self.num_layers
        own = self.num_parameters - self.layer_parameters + self.layer_parameters / self.num_ranks
        return math.ceil((own + gathered) * self.element_bytes)

    @property
    def rank_row_bytes(self) -> int:
        """Of one rank row in the slots."""
        return self.adapted_columns * (ADAPTER_BYTES + (self.element_bytes if self.has_shadow else 0))

    def activation_bytes(self, size: PassSize) -> int:
        """Of one pass: what forward saves for backward in every layer, what backward needs in one, and the logits.

        Saved per layer and token: both residuals and both norms' outputs, queries, keys and values, the attention's
        output, in the MLP each projection in, the activated gate and the product, and the adapters' inner outputs.
        """
        attention = 4 * self.width + 2 * self.query_width + 2 * self.key_value_width
        mlp = (2 + self.mlp_inputs) * self.mlp_width
        per_layer = {"none": attention + mlp, "mlp": attention, "layers": self.width}[self.recomputed]
        in_backward = 3 * self.mlp_width + 2 * self.width + attention + mlp - per_layer
        inner = size.lora_rank * self.adapted_layers
        per_token = self.element_bytes * (self.num_layers * per_layer + in_backward + inner)
        logits = min(self.chunk_bytes, size.labels * self.vocabulary * self.element_bytes)
        # Input of the head at the labels, and its gradient.
        return size.tokens * per_token + logits + 2 * size.labels * self.width * self.element_bytes


@dataclass(frozen=True, kw_only=True)
class PassSize:
    """What one pass holds at once."""

    tokens: int
    """With those that fill it up."""
    labels: int
    lora_rank: int
    """Largest of any job in it."""


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """The corrections to the arithmetic of a pass, and how well they fit."""

    scale: float = 1.0
    fixed_bytes: float = 0.0
    num_measured: int = 0
    """Measured passes behind it; 0: arithmetic alone."""
    residual_bytes: float = 0.0
    """Largest distance of a measured pass from the model."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Bytes of a packing."""

    shape: ModelShape
    fit: MemoryFit = MemoryFit()

    def slot_bytes(self, rank_rows: int) -> int:
        """Of the adapters, whether jobs hold them or not."""
        return rank_rows * self.shape.rank_row_bytes

    def pass_bytes(self, size: PassSize) -> int:
        """Peak of one forward and backward above backbone and slots."""
        return math.ceil(self.fit.scale * self.shape.activation_bytes(size) + self.fit.fixed_bytes)

    def peak_bytes(self, *, rank_rows: int, size: PassSize) -> int:
        """Of everything."""
        return self.shape.backbone_bytes + self.slot_bytes(rank_rows) + self.pass_bytes(size)


def fit_memory(shape: ModelShape, measured: Sequence[tuple[PassSize, int]]) -> MemoryFit:
    """Least squares of `scale` and `fixed_bytes` over measured passes.

    Args:
        shape: of the model.
        measured: sizes of passes, and the peak of each above what was held before.

    Returns:
        Arithmetic's scale of 1 with a fixed part where one distinct size was measured, or where the fitted scale is
        not credible. The fixed part is never negative.
    """
    if not measured:
        return MemoryFit()
    xs = [float(shape.activation_bytes(size)) for size, _ in measured]
    ys = [float(peak) for _, peak in measured]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    scale = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 1.0
    fixed = mean_y - scale * mean_x
    if fixed < 0:
        scale, fixed = sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs), 0.0
    if not SCALE_LIMITS[0] <= scale <= SCALE_LIMITS[1]:
        scale, fixed = 1.0, max(0.0, mean_y - mean_x)
    residual = max(abs(scale * x + fixed - y) for x, y in zip(xs, ys, strict=True))
    return MemoryFit(scale=scale, fixed_bytes=fixed, num_measured=len(measured), residual_bytes=residual)
