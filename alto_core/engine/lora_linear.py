"""Linear layers that add the LoRA paths of whichever adapters the current pass routes to them.

`attach` puts a `LoraLinear` around each chosen layer and `detach` takes it off again; the model is then as it was.
Which tokens go to which adapter is set once per forward pass in the `LoraRouting` that all layers share.

On Triton kernels, layers of one module that read the same input (q, k, v; gate, up) are one `SharedInput`: the first of
them to be called makes the outputs of all, and the others hand theirs on. So the input is read once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from alto_core.engine.quantized_linear import Nf4Linear
from alto_core.engine.slots import AdapterSlots, LayerAdapters
from alto_core.engine.target_modules import LinearLayer
from kernels.grouped_lora import grouped_lora, grouped_lora_linears
from kernels.projections import Projection
from kernels.segments import Segments
from kernels.side_streams import UnfinishedGradients

SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same input, where one module has them."""


class LoraRouting:
    """The segments of the forward pass that is under way; none outside of `use` and `use_on_device`."""

    def __init__(self) -> None:
        self._segments: Segments | None = None
        self._layers_by_segment: Sequence[Collection[int]] = ()
        self._made: dict[tuple[frozenset[int], int], Segments] = {}
        self.on_device: Segments | None = None
        """Segments that all layers take as they are; kernels read them on the device."""
        self.lowest_layer = 0
        """Layers before this one take no part in passes that are routed on the device."""
        self.accumulate = True
        """Whether backward adds to the gradient sinks, or writes them."""
        self.unfinished: UnfinishedGradients | None = None
        """Where gradients may be left to finish by themselves."""

    @contextmanager
    def use(self, segments: Segments, layers_by_segment: Sequence[Collection[int]]) -> Iterator[None]:
        """Route the forward passes inside this context. Backward may run after it.

        Args:
            segments: over tokens, or over rows when each row of the input holds equally many tokens.
            layers_by_segment: for each segment the indices of the layers that its adapter has.
        """
        assert self._segments is None, "one forward pass at a time"
        self._segments, self._layers_by_segment, self._made = segments, layers_by_segment, {}
        try:
            yield
        finally:
            self._segments, self._layers_by_segment, self._made = None, (), {}

    @contextmanager
    def use_on_device(
        self,
        segments: Segments,
        *,
        accumulate: bool,
        unfinished: UnfinishedGradients | None,
        lowest_layer: int = 0,
    ) -> Iterator[None]:
        """Route by segments whose content only the device knows; needs the Triton kernels.

        All adapters take part in all layers from `lowest_layer` on. Where an adapter lacks a layer its A and B are
        zero, and so are its output and its gradients there.
        """
        assert self.on_device is None, "one forward pass at a time"
        self.on_device, self.accumulate, self.unfinished = segments, accumulate, unfinished
        self.lowest_layer = lowest_layer
        try:
            yield
        finally:
            self.on_device = None

    def segments_for(self, layer_index: int, num_tokens: int) -> Segments | None:
        """Segments of one layer over its tokens; None when no adapter takes part there."""
        if self._segments is None:
            return None
        excluded = frozenset(i for i, layers in enumerate(self._layers_by_segment) if layer_index not in layers)
        key = (excluded, num_tokens)
        if key not in self._made:
            # The same few patterns serve all layers, so segments are made a few times per pass.
            segments = self._segments.without(excluded) if excluded else self._segments
            tokens_per_row, rest = divmod(num_tokens, segments.num_tokens)
            assert rest == 0, "rows of unequal length must be routed by tokens"
            self._made[key] = segments if tokens_per_row == 1 else segments.repeated(tokens_per_row)
        segments = self._made[key]
        return segments if segments.active else None


class LoraLinear(nn.Module):
    """A frozen linear layer (or Conv1D) and the adapters of all slots on it.

    Args:
        base: the frozen layer.
        layer: its description.
        adapters: of all slots for this layer.
        routing: shared by all layers of the model.
    """

    def __init__(self, base: nn.Module, layer: LinearLayer, adapters: LayerAdapters, routing: LoraRouting):
        super().__init__()
        self.base, self.layer = base, layer
        self._adapters, self._routing = adapters, routing
        self.shared_input = SharedInput((self,), routing)

    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        if self._routing.on_device is not None and self.shared_input.last_index >= self._routing.lowest_layer:
            return self.shared_input.output_of(self, x)
        x_TI = x.reshape(-1, self.layer.d_in)
        y_TO = self._base_product(x_TI)
        segments = self._routing.segments_for(self.layer.index, x_TI.shape[0])
        if segments is not None:
            own = self._adapters
            y_TO = grouped_lora(
                y_TO, x_TI, own.a_RI, own.b_RO, segments, self.layer.index, gradient_sinks=own.gradient_sinks
            )
        return y_TO.view(*x.shape[:-1], self.layer.d_out)

    def projection(self) -> Projection:
        """What the joint kernels need to know of this layer."""
        return Projection(
            weight=self._frozen_weight(),
            bias_O=self.bias,
            a_RI=self._adapters.a_RI,
            b_RO=self._adapters.b_RO,
            layer_index=self.layer.index,
            gradient_sinks=self._adapters.gradient_sinks,
        )

    def _frozen_weight(self) -> Tensor | Callable[[], Tensor]:
        if isinstance(self.base, Nf4Linear):
            return lambda: self.weight
        return self.weight.T if self.layer.is_conv1d else self.weight

    def _base_product(self, x_TI: Tensor) -> Tensor:
        """The frozen layer, into a tensor of its own that the LoRA paths may be added to."""
        if isinstance(self.base, Nf4Linear):
            return self.base(x_TI)
        if not self.layer.is_conv1d:
            return functional.linear(x_TI, self.weight, self.bias)
        assert self.bias is not None
        return torch.addmm(self.bias, x_TI, self.weight)


class SharedInput:
    """One to three layers whose outputs are made together.

    Args:
        layers: that read the same input.
        routing: shared by all layers of the model.
    """

    def __init__(self, layers: Sequence[LoraLinear], routing: LoraRouting):
        self._layers, self._routing = tuple(layers), routing
        self.last_index = max(layer.layer.index for layer in layers)
        self._projections: tuple[Projection, ...] = ()
        self._input: Tensor | None = None
        self._ready: dict[int, Tensor] = {}

    def output_of(self, layer: LoraLinear, x: Tensor) -> Tensor:
        """The layer's output for an input that the others are called with as well."""
        if self._input is not x or layer.layer.index not in self._ready:
            self._make(x)
        y = self._ready.pop(layer.layer.index)
        if not self._ready:
            self._input = None
        return y

    def _make(self, x: Tensor) -> None:
        segments = self._routing.on_device
        assert segments is not None
        self._projections = self._projections or tuple(layer.projection() for layer in self._layers)
        x_TI = x.reshape(-1, x.shape[-1]).contiguous()
        outputs = grouped_lora_linears(
            x_TI,
            self._projections,
            segments,
            accumulate=self._routing.accumulate,
            unfinished=self._routing.unfinished,
        )
        self._input = x
        self._ready = {
            layer.layer.index: y_TO.view(*x.shape[:-1], -1) for layer, y_TO in zip(self._layers, outputs, strict=True)
        }


def attach(model: nn.Module, slots: AdapterSlots, routing: LoraRouting) -> None:
    """Wrap every layer of the slots."""
    for layer in slots.layers:
        base = model.get_submodule(layer.name)
        assert not isinstance(base, LoraLinear), "the backbone already serves an engine; close that first"
        _replace(model, layer.name, LoraLinear(base, layer, slots.of_layer(layer), routing))
    for module in model.modules():
        for names in SHARED_INPUTS:
            members = [child for name in names if isinstance(child := getattr(module, name, None), LoraLinear)]
            if members:
                shared = SharedInput(members, routing)
                for member in members:
                    member.shared_input = shared


def detach(model: nn.Module) -> None:
    """Put the frozen layers back in place of all wrappers."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            _replace(model, name, module.base)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
