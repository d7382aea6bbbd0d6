"""Less memory for activations: parts of a model that run again in the backward pass instead of keeping what they made.

What runs again gives the same numbers, dropout masks included, so no result changes; only time does.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from alto_core.engine.decoder_layers import decoder_layers
from alto_core.errors import ModelError

Recomputed = Literal["none", "mlp", "layers"]
"""`mlp`: the feed-forward part of each layer, whose activations are the widest. `layers`: whole decoder layers."""


def recompute(model: Any, what: Recomputed) -> None:
    """Let these parts run again in backward. `keep_activations` undoes it.

    Raises:
        ModelError: the model has no such parts.
    """
    if what == "none":
        return
    layers = decoder_layers(model)
    parts = layers if what == "layers" else [part for layer in layers if (part := getattr(layer, "mlp", None))]
    if not parts:
        raise ModelError(
            f"activation_checkpointing: got {what!r}, but {type(model).__name__} has no such parts. Use `none`."
        )
    for part in parts:
        part.forward = functools.partial(
            checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
        )


def keep_activations(model: Any) -> None:
    """Undo `recompute`."""
    for layer in decoder_layers(model):
        for module in (layer, getattr(layer, "mlp", None)):
            if isinstance(module, nn.Module) and "forward" in vars(module):
                del module.forward
