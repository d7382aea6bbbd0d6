"""Which linear layers of a base model can get an adapter, and which of them a task asks for. Loads no weights.

A layer is asked for by the ending of its name, as in PEFT: `q_proj`, or `self_attn.q_proj`. The output head and the
embeddings stay frozen: they are shared by all jobs, and often tied to each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from alto_core.config import ModelSection
from alto_core.engine.model_files import LOADING_ERRORS, as_model_error, load_config
from alto_core.errors import ModelError, TaskFileError


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A linear layer of the backbone."""

    name: str
    """Dotted path in the model, for example `model.layers.0.self_attn.q_proj`."""
    index: int
    """Number among all linear layers of the model, whatever is adapted; dropout masks depend on it."""
    d_in: int
    d_out: int
    is_conv1d: bool
    """transformers' Conv1D (GPT-2): a linear layer whose weight is stored transposed."""


def find_linear_layers(model: Any) -> tuple[LinearLayer, ...]:
    """All linear layers of a transformers model in the order of its modules, without the output head."""
    head = model.get_output_embeddings()
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]
    return tuple(_describe(name, module, index) for index, (name, module) in enumerate(found))


def select_layers(layers: Iterable[LinearLayer], endings: Iterable[str]) -> tuple[LinearLayer, ...]:
    """The layers whose name is, or ends in, one of the endings."""
    wanted = tuple(endings)
    return tuple(layer for layer in layers if any(_matches(layer.name, ending) for ending in wanted))


def linear_endings(section: ModelSection) -> tuple[str, ...]:
    """Last parts of the names of all linear layers: what `all-linear` stands for.

    Raises:
        ModelError: the model's configuration cannot be read.
    """
    return tuple(sorted({layer.name.rsplit(".", 1)[-1] for layer in find_linear_layers(empty_model(section))}))


def check_target_modules(
    section: ModelSection, endings: Sequence[str], *, lora_ranks: Sequence[int] = ()
) -> dict[str, int]:
    """Check the layers that a task asks for against the model's structure.

    Args:
        section: the base model.
        endings: name endings of the layers to adapt.
        lora_ranks: ranks that these layers are to get.

    Returns:
        Number of layers that each ending matches, at least one.

    Raises:
        ModelError: the model cannot be read, an ending matches no linear layer, or it names the head or an embedding.
        TaskFileError: a rank is larger than the narrower side of a layer, where it adds nothing.
    """
    model = empty_model(section)
    layers = find_linear_layers(model)
    counts = {ending: len(select_layers(layers, [ending])) for ending in endings}
    _refuse_frozen_parts(model, [ending for ending, count in counts.items() if count == 0])
    for ending, count in counts.items():
        if count == 0:
            known = ", ".join(sorted({layer.name.rsplit(".", 1)[-1] for layer in layers}))
            raise ModelError(
                f"search_space.target_modules: got {ending!r}, which matches no linear layer of {section.name!r}, "
                f"expected one of: {known}. Check the spelling."
            )
    _check_ranks(select_layers(layers, endings), lora_ranks)
    return counts


def _check_ranks(layers: Sequence[LinearLayer], lora_ranks: Sequence[int]) -> None:
    narrowest = min(layers, key=lambda layer: min(layer.d_in, layer.d_out), default=None)
    largest = max(lora_ranks, default=0)
    if narrowest is not None and largest > min(narrowest.d_in, narrowest.d_out):
        raise TaskFileError(
            "search_space.lora_rank",
            got=str(largest),
            expected=f"at most {min(narrowest.d_in, narrowest.d_out)}, the narrower side of {narrowest.name} "
            f"({narrowest.d_in} -> {narrowest.d_out})",
            hint="A larger rank adds nothing there. Lower it, or leave this layer out of target_modules.",
        )


def _refuse_frozen_parts(model: Any, unmatched: Sequence[str]) -> None:
    frozen = [
        name for name, m in model.named_modules() if isinstance(m, nn.Embedding) or m is model.get_output_embeddings()
    ]
    for ending in unmatched:
        if any(_matches(name, ending) for name in frozen):
            raise ModelError(
                f"search_space.target_modules: got {ending!r}, the model's output head or an embedding, "
                "expected linear layers inside the model. Head and embeddings stay frozen, since all jobs share them."
            )


def empty_model(section: ModelSection) -> Any:
    """The model's structure on the meta device.

    Raises:
        ModelError: the configuration cannot be read.
    """
    config = load_config(section)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=section.trust_remote_code)
    except LOADING_ERRORS as error:
        raise as_model_error(section, error) from error
    return model


def _describe(name: str, module: nn.Linear | Conv1D, index: int) -> LinearLayer:
    if isinstance(module, Conv1D):
        d_in, d_out = module.weight.shape
    else:
        d_in, d_out = module.in_features, module.out_features
    return LinearLayer(name=name, index=index, d_in=d_in, d_out=d_out, is_conv1d=isinstance(module, Conv1D))


def _matches(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
