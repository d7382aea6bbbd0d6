"""What the jobs of an engine minimise, as an object that steps, passes and evaluation ask; and the usual one.

Shape suffixes: P labels, Q measured quantities, U units that a loss is the mean of (labels, or preference pairs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from alto_core.data.packing import PackedBatch
from alto_core.data.rows import TokenRow
from alto_core.domain import LoraJob, RowLosses
from alto_core.engine.backbone import Backbone
from alto_core.engine.losses import pass_losses
from alto_core.engine.packed_attention import PackedRows, RaggedRows
from alto_core.engine.pass_inputs import PairFields, PassInputs


@dataclass(frozen=True, kw_only=True)
class JobPart:
    """A job's share of one training pass."""

    job: LoraJob
    slot: int
    rows: Sequence[TokenRow]
    """Of the pass."""
    update: Sequence[TokenRow]
    """All rows of the update that the pass is part of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelFields:
    """What a pass needs to know of its labels and pairs beside the tokens."""

    label_weights_P: NDArray[np.float32]
    label_slots_P: NDArray[np.int32]
    pairs: PairFields[NDArray[Any]] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What a training pass came to."""

    objective: Tensor
    """Scalar whose gradient is every job's own."""
    losses_P: Tensor
    """Token losses, without gradient."""
    shares_QU: Sequence[Tensor]
    """Float64, without gradient: what each unit adds to its job's loss, then to each of the objective's `measures`."""
    slots_U: Tensor


class Objective(Protocol):
    """What jobs minimise."""

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what is measured in training beside the loss."""

    def num_units(self, rows: Sequence[TokenRow]) -> int:
        """What the loss of an update is the mean over."""

    def fields(self, batch: PackedBatch, parts: Sequence[JobPart]) -> LabelFields:
        """Weights and constants of one training pass.

        Args:
            batch: the rows of all parts, packed part by part.
            parts: of the jobs that take part.
        """

    def measure(self, backbone: Backbone, inputs: PassInputs, rows: PackedRows | RaggedRows) -> Measured:
        """Run the model on what `inputs` hold. A job that is not finite must not reach another's gradient."""

    def row_losses(self, job: LoraJob | None, rows: Sequence[TokenRow], sums_R2: NDArray[np.float64]) -> RowLosses:
        """Held-out losses.

        Args:
            job: whose adapter was on; None: the untuned model.
            rows: that were run.
            sums_R2: sum of the token losses of each side of a row; a plain row has one side.
        """


class TokenObjective:
    """The mean negative log-likelihood of all trained tokens: supervised fine-tuning.

    A preference pair counts as its trained tokens, whichever side they are on.
    """

    @property
    def measures(self) -> tuple[str, ...]:
        return ()

    def num_units(self, rows: Sequence[TokenRow]) -> int:
        return sum(row.num_labels for row in rows)

    def fields(self, batch: PackedBatch, parts: Sequence[JobPart]) -> LabelFields:
        weights = np.array([1.0 / self.num_units(part.update) for part in parts], dtype=np.float32)
        slots = np.array([part.slot for part in parts], dtype=np.int32)
        part_of_label_P = np.array(batch.row_slots)[batch.label_rows_P]
        return LabelFields(label_weights_P=weights[part_of_label_P], label_slots_P=slots[part_of_label_P])

    def measure(self, backbone: Backbone, inputs: PassInputs, rows: PackedRows | RaggedRows) -> Measured:
        objective, losses_P = pass_losses(backbone, inputs, rows)
        shares_P = losses_P.double() * inputs.label_weights_P
        return Measured(objective=objective, losses_P=losses_P, shares_QU=(shares_P,), slots_U=inputs.label_slots_P)

    def row_losses(self, job: LoraJob | None, rows: Sequence[TokenRow], sums_R2: NDArray[np.float64]) -> RowLosses:
        return RowLosses(
            loss_sums=tuple(sums_R2.sum(axis=1).tolist()), num_labels=tuple(row.num_labels for row in rows)
        )


Reference = Mapping[int, tuple[float, float]]
"""Sum of the token losses of a pair's chosen and rejected answer under the reference, by row id."""
