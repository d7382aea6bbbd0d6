"""Tensor parallelism, one adapter at a time: every rank holds a slice of every linear layer of the decoder.

Projections that lead into attention and the gated product are cut by outputs, those that lead out of them by inputs,
so a decoder layer sums over the ranks twice forward and twice backward. LoRA goes with its layer: the side along the
cut is cut too, the other is whole on every rank and its gradients are summed. Embeddings, norms and head are whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.fsdp_baselines import LORA_RANK

CUT_BY_INPUTS = ("o_proj", "down_proj")


class _SumOfGradients(torch.autograd.Function):
    """What enters a cut region: its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Sum(torch.autograd.Function):
    """What leaves a cut region: the sum of the ranks' parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class CutLora(nn.Module):
    """This rank's slice of a frozen linear layer with one adapter. Of a model on the meta device."""

    def __init__(self, base: nn.Linear, num_ranks: int, *, by_inputs: bool):
        super().__init__()
        self.by_inputs = by_inputs
        inputs = base.in_features // (num_ranks if by_inputs else 1)
        outputs = base.out_features // (1 if by_inputs else num_ranks)
        make = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.base = nn.Linear(inputs, outputs, bias=base.bias is not None, **make).requires_grad_(False)
        self.a = nn.Parameter(torch.empty(LORA_RANK, inputs, **make))
        self.b = nn.Parameter(torch.empty(outputs, LORA_RANK, **make))

    @property
    def whole(self) -> nn.Parameter:
        """The side of the adapter that every rank has."""
        return self.b if self.by_inputs else self.a

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_inputs:
            x = _SumOfGradients.apply(x)
        y = self.base(x) + 2.0 * nn.functional.linear(nn.functional.linear(x, self.a), self.b)
        return _Sum.apply(y) if self.by_inputs else y


def cut(model: Any) -> None:
    """Leave this rank's slices of the decoder layers, with adapters.

    Raises:
        ValueError: the heads cannot be dealt out evenly.
    """
    num_ranks, config = dist.get_world_size(), model.config
    if config.num_key_value_heads % num_ranks:
        raise ValueError(f"expected key/value heads in equal parts, got {config.num_key_value_heads} on {num_ranks}")
    for layer in model.model.layers:
        for module in list(layer.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, CutLora(child, num_ranks, by_inputs=name in CUT_BY_INPUTS))


def tensor_parallel_step(model: Any, rows: int, length: int, labels: int, device: torch.device) -> Callable[[], None]:
    """One update of one adapter; all ranks have the same rows."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    shared = [module.whole for module in model.modules() if isinstance(module, CutLora)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=device.type == "cuda")
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)
    dist.broadcast(ids, 0)

    def step() -> None:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=labels + 1).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, -labels:].flatten())
        loss.backward()
        gradients = [parameter.grad for parameter in shared if parameter.grad is not None]
        summed = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(summed)
        for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
