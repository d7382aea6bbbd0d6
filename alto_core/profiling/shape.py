"""What the memory arithmetic needs to know of a base model, read from its structure. No weights are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from alto_core.config import ModelSection
from alto_core.engine.activation_checkpointing import Recomputed
from alto_core.engine.backbone import Backbone
from alto_core.engine.decoder_layers import decoder_layers
from alto_core.engine.quantized_linear import quantized_parameters
from alto_core.engine.target_modules import LinearLayer, empty_model, find_linear_layers, select_layers
from alto_core.scheduling.memory_model import ModelShape
from kernels.linear_cross_entropy import CHUNK_BYTES
from kernels.path_choice import Implementation, choose_path


def shape_of_backbone(
    backbone: Backbone, target_modules: Sequence[str], *, recomputed: Recomputed = "none"
) -> ModelShape:
    """Of a loaded model, as it runs on its device."""
    on_kernels = choose_path(backbone.device, backbone.dtype).implementation is Implementation.TRITON
    layers = select_layers(backbone.layers, target_modules)
    return _shape(
        backbone.model,
        layers,
        backbone.dtype,
        has_shadow=on_kernels and backbone.dtype != torch.float32,
        recomputed=recomputed,
        quantized=quantized_parameters(backbone.model),
    )


def shape_of_model(
    section: ModelSection, target_modules: Sequence[str], *, on_gpu: bool, recomputed: Recomputed = "none"
) -> ModelShape:
    """Of a model that is not loaded, as it would run on the CPU, or on a GPU with kernels.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    dtype = names.get(section.dtype, torch.bfloat16 if on_gpu else torch.float32)
    model = empty_model(section)
    linear = find_linear_layers(model)
    return _shape(
        model,
        select_layers(linear, target_modules),
        dtype,
        has_shadow=on_gpu and dtype != torch.float32,
        recomputed=recomputed,
        quantized=0 if section.quantization == "none" else sum(layer.d_in * layer.d_out for layer in linear),
    )


def _shape(
    model: Any,
    layers: Sequence[LinearLayer],
    dtype: torch.dtype,
    *,
    has_shadow: bool,
    recomputed: Recomputed,
    quantized: int,
) -> ModelShape:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or config.hidden_size // heads
    mlp_width = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * config.hidden_size
    into_mlp = [layer for layer in find_linear_layers(model) if layer.d_out == mlp_width]
    return ModelShape(
        # `parameters` gives a tied weight once, and packed weights not at all.
        num_parameters=sum(parameter.numel() for parameter in model.parameters()) + quantized_parameters(model),
        element_bytes=dtype.itemsize,
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        query_width=heads * head_width,
        key_value_width=(getattr(config, "num_key_value_heads", None) or heads) * head_width,
        mlp_width=mlp_width,
        mlp_inputs=max(1, min(2, len(into_mlp) // config.num_hidden_layers)),
        vocabulary=config.vocab_size,
        adapted_columns=sum(layer.d_in + layer.d_out for layer in layers),
        adapted_layers=len(layers),
        has_shadow=has_shadow,
        chunk_bytes=CHUNK_BYTES,
        recomputed=recomputed,
        quantized_parameters=quantized,
        layer_parameters=sum(p.numel() for layer in decoder_layers(model) for p in layer.parameters()),
    )
