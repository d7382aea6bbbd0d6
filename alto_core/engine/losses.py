"""Token losses of a pass, in float32, from the model's output at label positions alone.

Shape suffixes: T tokens, N rows, P labels, D model width, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from alto_core.engine.backbone import Backbone, packed_hidden, packed_logits
from alto_core.engine.packed_attention import PackedRows, RaggedRows
from alto_core.engine.pass_inputs import PassInputs
from kernels.linear_cross_entropy import linear_cross_entropy, linear_token_losses


def pass_losses(backbone: Backbone, inputs: PassInputs, rows: PackedRows | RaggedRows) -> tuple[Tensor, Tensor]:
    """The objective whose gradient is every job's own, and the negative log-likelihood of every label.

    A token passes a gradient of its own weight, whatever the other losses are: a NaN stays alone.

    Returns:
        The weighted sum of the losses, float32 scalar; the losses in nats, float32 [P], without gradient.
    """
    if backbone.head is None:
        losses_P = _losses_of_logits(backbone, inputs, rows)
        weighted_P = losses_P * inputs.label_weights_P
        return torch.where(inputs.label_weights_P == 0, 0.0, weighted_P).sum(), losses_P.detach()
    return linear_cross_entropy(
        _label_hidden(backbone, inputs, rows),
        backbone.head.weight,
        backbone.head.bias,
        inputs.label_ids_P,
        inputs.label_weights_P,
    )


def token_losses(backbone: Backbone, inputs: PassInputs, rows: PackedRows | RaggedRows) -> Tensor:
    """The negative log-likelihood of every label, float32 [P], each differentiable, whatever the others are."""
    if backbone.head is None:
        return _losses_of_logits(backbone, inputs, rows)
    return linear_token_losses(
        _label_hidden(backbone, inputs, rows), backbone.head.weight, backbone.head.bias, inputs.label_ids_P
    )


def _label_hidden(backbone: Backbone, inputs: PassInputs, rows: PackedRows | RaggedRows) -> Tensor:
    hidden_TD = packed_hidden(backbone.model, inputs.token_ids_T, inputs.position_ids_T, rows)
    return hidden_TD.index_select(0, inputs.label_positions_P)


def _losses_of_logits(backbone: Backbone, inputs: PassInputs, rows: PackedRows | RaggedRows) -> Tensor:
    """Of a model that does more to its logits than one product; its own forward knows what."""
    logits_PV = packed_logits(backbone.model, inputs.token_ids_T, inputs.position_ids_T, rows, inputs.label_positions_P)
    return functional.cross_entropy(logits_PV.float(), inputs.label_ids_P, reduction="none")


def sums_by_row(losses_P: NDArray[np.float32], label_rows_P: NDArray[np.int64], num_rows: int) -> NDArray[np.float64]:
    """Sum of token losses of each row, added up in float64; 0 for a row without labels."""
    sums_N = np.zeros(num_rows)
    np.add.at(sums_N, label_rows_P, losses_P)
    return sums_N
