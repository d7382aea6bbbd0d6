"""The frozen base model: loaded once, checked, shared by all jobs of a process.

The check runs two short rows through the loaded model and refuses one whose packed rows see each other (state-space
layers, attention that ignores transformers' interface) or whose weights are not finite.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from alto_core.config import ModelSection
from alto_core.engine.model_files import LOADING_ERRORS, as_model_error, declared_name, load_config
from alto_core.engine.packed_attention import (
    PACKED_ATTENTION,
    PackedRows,
    RowLayout,
    register_packed_attention,
    shares_prompts,
)
from alto_core.engine.quantized_linear import quantize_layers
from alto_core.engine.target_modules import LinearLayer, find_linear_layers
from alto_core.errors import ModelError

if TYPE_CHECKING:
    from alto_core.engine.sharding import ShardedLayers

LEAK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest change of a row's logits, in their standard deviations, when its neighbour changes or goes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Backbone:
    """A frozen causal language model on one device."""

    model: Any
    """The transformers model, in eval mode, without gradients, its attention set to `alto_packed`."""
    device: torch.device
    dtype: torch.dtype
    name: str
    """What exported adapters give as their base model: a hub id or the folder's own name, never a path."""
    layers: tuple[LinearLayer, ...]
    """All linear layers that can be adapted."""
    head: nn.Linear | None
    """The output head, where logits are its product with the last hidden states and nothing else."""
    takes_ragged_rows: bool
    """Whether flash attention on rows of any length serves all layers: CUDA, half precision, no bent scores."""
    shares_prompts: bool
    """Whether the two answers of a preference pair may follow one prompt in a pack; else it stands there twice."""
    max_positions: int | None
    """Longest sequence that the model was made for; None when it does not say."""
    sharded: ShardedLayers | None = None
    """Where other ranks hold parts of the weights; None: all of them are here."""

    def passing(self, *, gradients: bool) -> AbstractContextManager[None]:
        """Every pass of the model, with or without backward, runs inside such a block."""
        return nullcontext() if self.sharded is None else self.sharded.taking_part(gradients=gradients)


_loaded: tuple[tuple[Any, ...], Backbone] | None = None


def load_backbone(
    section: ModelSection, device: str, *, shard: Callable[[Any], ShardedLayers] | None = None
) -> Backbone:
    """Load the base model, or take the one this process loaded last if it is the same.

    Args:
        section: which model, and in which dtype.
        device: `cpu`, `cuda` or `cuda:N`.
        shard: divides the model over ranks, all of which load it; None: it is held whole.

    Raises:
        ModelError: the model is missing, broken, incomplete, needs code of its own, or cannot take packed rows.
    """
    global _loaded
    dtype = _dtype(section, device)
    key = (section.name, section.revision, section.trust_remote_code, section.quantization, dtype, device)
    if _loaded is not None and _loaded[0] == key:
        return _loaded[1]
    release_backbone()
    load_config(section)
    model = _load_model(section, dtype)
    if section.quantization == "nf4":
        assert shard is None, "packed weights are not divided"
        quantize_layers(model, torch.device(device))
    sharded = shard(model) if shard else None
    model = model.to(device)
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"model.name: {section.name!r} ({type(model).__name__}) cannot give single positions' logits. "
            "Use another model."
        )
    check_rows_are_apart(model, section.name)
    takes_ragged_rows = _takes_ragged_rows(model, torch.device(device), dtype)
    backbone = Backbone(
        model=model,
        device=torch.device(device),
        dtype=dtype,
        name=declared_name(section),
        layers=find_linear_layers(model),
        head=_plain_head(model),
        takes_ragged_rows=takes_ragged_rows,
        shares_prompts=not takes_ragged_rows or shares_prompts(torch.device(device), dtype),
        max_positions=getattr(model.config, "max_position_embeddings", None),
        sharded=sharded,
    )
    _loaded = (key, backbone)
    return backbone


def release_backbone() -> None:
    """Forget the loaded model, so that its memory can be used again once nobody holds it."""
    global _loaded
    _loaded = None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def packed_logits(
    model: Any, token_ids_T: Tensor, position_ids_T: Tensor, rows: RowLayout, positions_P: Tensor
) -> Tensor:
    """Logits [P, vocabulary] at chosen positions of a packed sequence, by the model's own forward and head."""
    output = model(
        input_ids=token_ids_T[None],
        position_ids=position_ids_T[None],
        attention_mask=None,
        use_cache=False,
        logits_to_keep=positions_P,
        packed_rows=rows,
    )
    return output.logits[0]


def packed_hidden(model: Any, token_ids_T: Tensor, position_ids_T: Tensor, rows: RowLayout) -> Tensor:
    """Last hidden states [T, D] of a packed sequence, what the output head reads."""
    output = model.base_model(
        input_ids=token_ids_T[None],
        position_ids=position_ids_T[None],
        attention_mask=None,
        use_cache=False,
        packed_rows=rows,
    )
    return output.last_hidden_state[0]


class _CountedRows(PackedRows):
    """Notes how often an attention layer used the layout."""

    uses = 0

    def gather(self, x_NHLD: Tensor) -> Tensor:
        type(self).uses += 1
        return super().gather(x_NHLD)


def check_rows_are_apart(model: Any, name: str) -> None:
    """Run a row beside two different neighbours and alone.

    Raises:
        ModelError: its logits are not finite or depend on its neighbour, or a layer does not use the packed attention.
    """
    parameter = next(model.parameters())
    what = f"model.name: {name!r} ({type(model).__name__})"
    _CountedRows.uses = 0
    try:
        beside_one, beside_other, alone = (
            _row_logits(model, neighbour, parameter.device) for neighbour in (3, 4, None)
        )
    except LOADING_ERRORS as error:
        raise ModelError(f"{what} does not run with packed rows: {error}. Use another model.") from error
    if not beside_one.isfinite().all():
        raise ModelError(
            f"{what} gives logits that are not finite. Its weights are damaged, or need another `model.dtype`."
        )
    layers, tolerance, spread = model.config.num_hidden_layers, LEAK_TOLERANCE[parameter.dtype], alone.std().item()
    change = max((beside_one - other).abs().max().item() for other in (beside_other, alone))
    if _CountedRows.uses != 3 * layers or change > tolerance * spread:
        raise ModelError(
            f"{what} lets packed rows see each other: {_CountedRows.uses / 3:g} of {layers} layers use the packed "
            f"attention, and logits move by {change / spread:.2g} of their spread (expected at most {tolerance:g}) "
            "with another neighbour. Use a model with plain causal attention in all layers."
        )


@torch.no_grad()
def _plain_head(model: Any) -> nn.Linear | None:
    """The head if its product with the hidden states gives the model's logits; None where those are scaled or bent."""
    head, device = model.get_output_embeddings(), next(model.parameters()).device
    ids_T = torch.arange(1, 7, device=device) % model.config.vocab_size
    positions_T = torch.arange(6, device=device)
    rows = PackedRows((6,), device)
    own = packed_logits(model, ids_T, positions_T, rows, positions_T)
    hidden = packed_hidden(model, ids_T, positions_T, rows)
    if not isinstance(head, nn.Linear) or hidden.shape[-1] != head.in_features:
        return None
    return head if torch.allclose(head(hidden), own, rtol=1e-3, atol=1e-3 * own.float().std().item()) else None


def _takes_ragged_rows(model: Any, device: torch.device, dtype: torch.dtype) -> bool:
    text_config = model.config.get_text_config()
    bends_scores = getattr(text_config, "attn_logit_softcapping", None) is not None
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or bends_scores:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8


@torch.no_grad()  # not in inference mode: weights that are first gathered there cannot be trained through
def _row_logits(model: Any, neighbour: int | None, device: torch.device) -> Tensor:
    """float32 [6, vocabulary] of one fixed row, packed behind a neighbour or alone."""
    vocabulary = model.config.vocab_size
    row = [(1 + 5 * i) % vocabulary for i in range(6)]
    before = [] if neighbour is None else [(neighbour + 7 * i) % vocabulary for i in range(4)]
    lengths = (len(row),) if neighbour is None else (len(before), len(row))
    ids_T = torch.tensor(before + row, device=device)
    positions_T = torch.cat([torch.arange(length) for length in lengths]).to(device)
    kept_P = torch.arange(len(before), len(before) + len(row), device=device)
    return packed_logits(model, ids_T, positions_T, _CountedRows(lengths, device), kept_P).float()


def _load_model(section: ModelSection, dtype: torch.dtype) -> nn.Module:
    register_packed_attention()
    try:
        with _without_progress_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
                section.name,
                revision=section.revision,
                trust_remote_code=section.trust_remote_code,
                dtype=dtype,
                attn_implementation=PACKED_ATTENTION,
                use_safetensors=True,
                output_loading_info=True,
            )
    except LOADING_ERRORS as error:
        raise as_model_error(section, error) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"model.name: the weights of {section.name!r} lack {len(missing)} tensors that the model needs, "
            f"for example {missing[0]!r}. transformers would draw them at random. Get the complete model."
        )
    # The folder's own sampling habits (temperature, repetition penalty) must not enter greedy decoding.
    model.generation_config = GenerationConfig()
    return model.eval().requires_grad_(False)


class _without_progress_bars:  # noqa: N801 - used as a function
    """transformers draws a bar per load; the command line has its own display."""

    def __enter__(self) -> None:
        self._were_on = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        if self._were_on:
            transformers_logging.enable_progress_bar()


def _dtype(section: ModelSection, device: str) -> torch.dtype:
    if section.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[section.dtype]
    # Cards that only emulate bfloat16 are slower in it than in float32.
    if device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32
