"""Frozen linear layers whose weights lie in 4 bits (NormalFloat with quantized scales, as in QLoRA, arXiv 2305.14314).

The format and its kernels are bitsandbytes'. A weight is unpacked in the compute dtype for each product and dropped
again, in backward anew. So what a layer holds is 0.52 bytes a parameter, and results are those of the unpacked weights.

Shape suffixes: T tokens, I input and O output features.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from alto_core.config import ModelSection
from alto_core.engine.target_modules import empty_model, find_linear_layers
from alto_core.errors import TaskFileError

BLOCK = 64
"""Values with a scale of their own, in 8 bits; 256 scales have one of theirs."""


class Nf4Linear(nn.Linear):
    """A linear layer with a packed weight; `weight` is a new tensor at each access.

    Args:
        linear: the layer, its weight on the device that packs it.
    """

    def __init__(self, linear: nn.Linear):
        from bitsandbytes.functional import quantize_4bit

        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed, self._state = quantize_4bit(
            linear.weight.data, blocksize=BLOCK, quant_type="nf4", compress_statistics=True
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        from bitsandbytes.functional import dequantize_4bit

        unpacked: Tensor = dequantize_4bit(self._packed, self._state)
        return unpacked

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """What stands for the weight: packed values, their scales, the scales' own, and the tables of both."""
        scales = self._state.state2
        return self._packed, self._state.absmax, scales.absmax, self._state.code, scales.code

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = _FrozenProduct.apply(x, self)
        return product


class _FrozenProduct(torch.autograd.Function):
    """x W^T + bias, that keeps nothing for backward but the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight, layer.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ ctx.layer.weight, None


def check_quantization(section: ModelSection) -> None:
    """Check that the model can be held as the section asks.

    Raises:
        TaskFileError: bitsandbytes is not installed, or the model has linear layers of another kind.
        ModelError: the model's configuration cannot be read.
    """
    if section.quantization == "none":
        return
    if importlib.util.find_spec("bitsandbytes") is None:
        raise TaskFileError(
            "model.quantization",
            got=f"{section.quantization}, whose library bitsandbytes is not installed",
            expected="an installed one",
            hint="pip install 'alto-lora[quantization]'",
        )
    other = next((layer for layer in find_linear_layers(empty_model(section)) if layer.is_conv1d), None)
    if other is not None:
        raise TaskFileError(
            "model.quantization",
            got=f"{section.quantization} with {section.name!r}, whose {other.name} is a Conv1D",
            expected="none, or a model of nn.Linear layers",
        )


def quantize_layers(model: Any, device: torch.device) -> None:
    """Pack the weights of all linear layers but the output head, one after another on the device.

    What is not packed stays where it is.
    """
    for layer in find_linear_layers(model):
        parent, _, child = layer.name.rpartition(".")
        linear = model.get_submodule(layer.name).to(device)
        setattr(model.get_submodule(parent), child, Nf4Linear(linear))


def quantized_layers(model: Any) -> Iterator[Nf4Linear]:
    """The model's packed layers."""
    return (module for module in model.modules() if isinstance(module, Nf4Linear))


def quantized_parameters(model: Any) -> int:
    """How many of the model's parameters are packed."""
    return sum(layer.in_features * layer.out_features for layer in quantized_layers(model))
