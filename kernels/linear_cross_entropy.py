"""Token losses of a frozen output head, with the gradient of its input made in the same pass.

    loss_p = logsumexp(h_p W^T + bias) - (h_p W^T + bias)[label_p],    objective = sum_p weight_p loss_p

The logits of a few thousand positions exist at a time, in the dtype of `h`: the head is frozen, so its gradient is not
needed, and dh = (softmax - onehot) * weight W is formed from a chunk's logits before the next chunk overwrites them.

Shape suffixes: P positions, c positions of a chunk, D width of the model, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from kernels.path_choice import Implementation, choose_path

CHUNK_BYTES = 1 << 30
"""Most bytes of one chunk's logits."""
CHUNK_STEP = 16
"""Positions of a chunk are a multiple of this, and the last chunk is filled up: for a few odd rows CPU libraries add up
the head's long sums, a vocabulary each, ten times less exactly, and attention that rests on one token amplifies that a
hundredfold."""


def linear_cross_entropy(
    hidden_PD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    label_ids_P: Tensor,
    label_weights_P: Tensor,
) -> tuple[Tensor, Tensor]:
    """Losses of all positions, and their weighted sum.

    Args:
        hidden_PD: input of the head at the positions whose next token is a label.
        weight_VD: frozen; dtype of `hidden_PD`.
        bias_V: frozen, or None.
        label_ids_P: int64, in [0, V).
        label_weights_P: float32. A position of weight 0 passes no gradient, whatever its loss is.

    Returns:
        The objective, a float32 scalar differentiable once with respect to `hidden_PD`, and the losses, float32 [P] in
        nats, without gradient.

    Raises:
        ValueError: the shapes do not fit.
    """
    num_positions = hidden_PD.shape[0]
    if hidden_PD.dim() != 2 or weight_VD.shape[1:] != hidden_PD.shape[1:] or len(label_ids_P) != num_positions:
        shapes = f"hidden {tuple(hidden_PD.shape)}, weight {tuple(weight_VD.shape)}, labels {tuple(label_ids_P.shape)}"
        raise ValueError(f"linear_cross_entropy expects hidden [P, D], weight [V, D], labels [P], but got {shapes}")
    return _LinearCrossEntropy.apply(hidden_PD, weight_VD, bias_V, label_ids_P, label_weights_P)


def linear_token_losses(hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, label_ids_P: Tensor) -> Tensor:
    """Losses of all positions, each differentiable, for objectives that are more than a weighted sum of them.

        dh_p = dloss_p * (softmax_p - onehot_p) W

    The part behind dloss_p needs no other position, so it too is made from a chunk's logits before they are gone, and
    only scaled in backward. A position whose loss gets no gradient passes none, whatever it is.

    Returns:
        float32 [P] in nats, differentiable once with respect to `hidden_PD`.
    """
    losses_P = _LinearTokenLosses.apply(hidden_PD, weight_VD, bias_V, label_ids_P)
    assert isinstance(losses_P, Tensor)
    return losses_P


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        label_ids_P: Tensor,
        label_weights_P: Tensor,
    ) -> tuple[Tensor, Tensor]:
        losses_P, dh_PD = _in_chunks(
            hidden_PD, weight_VD, bias_V, label_ids_P, label_weights_P, needs_gradient=ctx.needs_input_grad[0]
        )
        ctx.mark_non_differentiable(losses_P)
        ctx.save_for_backward(dh_PD)
        weighted_P = torch.where(label_weights_P == 0, 0.0, losses_P * label_weights_P)
        return weighted_P.sum(), losses_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_objective: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (dh_PD,) = ctx.saved_tensors
        return dh_PD * d_objective.to(dh_PD.dtype), None, None, None, None


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_PD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, label_ids_P: Tensor) -> Tensor:
        ones_P = torch.ones(len(label_ids_P), dtype=torch.float32, device=hidden_PD.device)
        losses_P, dh_PD = _in_chunks(
            hidden_PD, weight_VD, bias_V, label_ids_P, ones_P, needs_gradient=ctx.needs_input_grad[0]
        )
        ctx.save_for_backward(dh_PD)
        return losses_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses_P: Tensor) -> tuple[Tensor | None, ...]:
        (dh_PD,) = ctx.saved_tensors
        scaled_PD = dh_PD * d_losses_P[:, None].to(dh_PD.dtype)
        return scaled_PD.masked_fill_((d_losses_P == 0)[:, None], 0.0), None, None, None


def _in_chunks(
    hidden_PD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    label_ids_P: Tensor,
    label_weights_P: Tensor,
    *,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Losses, float32 [P], and the gradient of their weighted sum with respect to `hidden_PD` where it is needed."""
    losses_P = hidden_PD.new_empty(len(hidden_PD), dtype=torch.float32)
    dh_PD = torch.empty_like(hidden_PD) if needs_gradient else None
    row_bytes = weight_VD.shape[0] * hidden_PD.element_size()
    chunk = max(CHUNK_STEP, CHUNK_BYTES // row_bytes // CHUNK_STEP * CHUNK_STEP)
    for start in range(0, len(hidden_PD), chunk):
        part = slice(start, min(start + chunk, len(hidden_PD)))
        hidden_cD = functional.pad(hidden_PD[part], (0, 0, 0, -(part.stop - start) % CHUNK_STEP))
        logits_cV = functional.linear(hidden_cD, weight_VD, bias_V)[: part.stop - start]
        losses_P[part] = softmax_losses_(logits_cV, label_ids_P[part], label_weights_P[part], needs_gradient)
        if dh_PD is not None:
            dh_PD[part] = logits_cV @ weight_VD
    return losses_P, dh_PD


def softmax_losses_(logits_cV: Tensor, label_ids_c: Tensor, weights_c: Tensor, write_gradient: bool) -> Tensor:
    """Losses, float32 [c]; with `write_gradient` the logits become (softmax - onehot) * weight, in their own dtype."""
    if choose_path(logits_cV.device, logits_cV.dtype).implementation is Implementation.TRITON:
        from kernels.triton_cross_entropy import softmax_losses_ as on_triton

        return on_triton(logits_cV, label_ids_c, weights_c, write_gradient)
    return softmax_losses_twin_(logits_cV, label_ids_c, weights_c, write_gradient)


def softmax_losses_twin_(logits_cV: Tensor, label_ids_c: Tensor, weights_c: Tensor, write_gradient: bool) -> Tensor:
    """What the Triton kernel computes, in torch."""
    log_probs_cV = functional.log_softmax(logits_cV, dim=-1, dtype=torch.float32)
    losses_c = -log_probs_cV.gather(1, label_ids_c[:, None])[:, 0]
    if write_gradient:
        gradient_cV = log_probs_cV.exp_()
        gradient_cV[torch.arange(len(label_ids_c), device=logits_cV.device), label_ids_c] -= 1.0
        gradient_cV *= weights_c[:, None]
        logits_cV.copy_(gradient_cV.masked_fill_((weights_c == 0)[:, None], 0.0))
    return losses_c
