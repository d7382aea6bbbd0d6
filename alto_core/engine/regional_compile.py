"""Fuses what stands between the linear layers of a model, layer by layer, with `torch.compile`.

Each decoder layer is compiled as it is. The wrapped linear layers and the attention stay out of it, so what is fused
are norms, rotary embeddings, activations and residual additions. All layers of a model share the compiled code, and it
serves every number of tokens: code for one number alone would be made first and be of use to no other pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alto_core.engine.decoder_layers import decoder_layers


def compile_layers(model: Any) -> None:
    """Compile every decoder layer at its next call. Models whose layers are not found run as they are."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def uncompile_layers(model: Any) -> None:
    """Let every decoder layer run as transformers wrote it."""
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None


@contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Inside the block every layer runs as transformers wrote it: for passes whose shapes change all the time."""
    compiled = [(layer, layer._compiled_call_impl) for layer in decoder_layers(model)]
    uncompile_layers(model)
    try:
        yield
    finally:
        for layer, implementation in compiled:
            layer._compiled_call_impl = implementation
