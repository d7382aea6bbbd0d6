"""Where a transformers model keeps its decoder layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def decoder_layers(model: Any) -> list[nn.Module]:
    """The model's layers in their order; empty where they are not a list of the length that its configuration says."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return list(lists[0]) if lists else []
