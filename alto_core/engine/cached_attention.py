"""Attention of generation, registered with transformers as `alto_cached`: each row attends to its own cache.

Rows lie in one sequence [1, T], as in training. A prompt is read in one pass, all its tokens attending as in
`packed_attention`; after that a pass holds one token of every row, which sees the row's whole cache. Nothing is padded
on the left, so an answer does not depend on the batch.

Shape suffixes: T tokens of a pass, N rows, L places of the cache, H heads, K key/value heads, G = H / K, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from alto_core.engine.packed_attention import PACKED_ATTENTION, PackedRows, packed_attention
from alto_core.engine.regional_compile import uncompiled

CACHED_ATTENTION = "alto_cached"
ALIGNMENT = 8
"""Places of a cache, and those that a pass looks at, are a multiple of this: fused kernels want aligned masks."""


class KeyValueCache:
    """Keys and values of all layers, [N, K, L, D] each; a layer's are made when it first stores some.

    Args:
        num_rows: N.
        capacity: L; a row's token at position p has place p.
    """

    def __init__(self, num_rows: int, capacity: int):
        self.num_rows, self.capacity = num_rows, aligned(capacity)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, key: Tensor, value: Tensor, rows_T: Tensor, positions_T: Tensor) -> None:
        """Keep the keys and values [1, K, T, D] of a pass."""
        if layer not in self._layers:
            _, heads, _, width = key.shape
            shape = (self.num_rows, heads, self.capacity, width)
            self._layers[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        for buffer_NKLD, new in zip(self._layers[layer], (key, value), strict=True):
            buffer_NKLD[rows_T, :, positions_T] = new[0].transpose(0, 1)

    def first(self, layer: int, places: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer at the first so many places."""
        keys_NKLD, values_NKLD = self._layers[layer]
        return keys_NKLD[:, :, :places], values_NKLD[:, :, :places]

    def move_to(self, other: KeyValueCache, kept: Sequence[int], places: Sequence[int], filled: int) -> None:
        """Copy rows `kept` into rows `places` of an empty cache of another size; this one is empty afterwards.

        Args:
            filled: no row kept has a token at or beyond this place.
        """
        for layer in list(self._layers):
            buffers = self._layers.pop(layer)  # one layer at a time lies in memory twice
            made = []
            for old_NKLD in buffers:
                _, heads, _, width = old_NKLD.shape
                new_NKLD = old_NKLD.new_zeros(other.num_rows, heads, other.capacity, width)
                if kept:
                    index = torch.tensor(kept, device=old_NKLD.device)
                    target = torch.tensor(places, device=old_NKLD.device)
                    new_NKLD[target, :, :filled] = old_NKLD[index, :, :filled]
                made.append(new_NKLD)
            other._layers[layer] = (made[0], made[1])


@dataclass(kw_only=True, eq=False)
class CachedRows:
    """The layout of one pass; travels as `packed_rows` from the model's forward to the attention."""

    cache: KeyValueCache
    rows_T: Tensor
    """Row of the cache that each token belongs to."""
    positions_T: Tensor
    prompts: PackedRows | None
    """Layout of the prompts that this pass reads; None for a pass with one token of every row, in order."""
    longest: int
    """No token of this pass has a position at or beyond it."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, sliding_window: int | None, like: Tensor) -> Tensor:
        """What is added to scores [N, K, G, L]: 0 where a row's token sees a place, else minus infinity."""
        if sliding_window not in self._masks:
            places = min(aligned(self.longest), self.cache.capacity)
            place_L = torch.arange(places, device=like.device)
            position_N1 = self.positions_T[:, None]
            seen_NL = place_L <= position_N1
            if sliding_window is not None:
                seen_NL &= place_L > position_N1 - sliding_window
            zeros_NL = torch.zeros(seen_NL.shape, dtype=like.dtype, device=like.device)
            self._masks[sliding_window] = zeros_NL.masked_fill_(~seen_NL, float("-inf"))[:, None, None]
        return self._masks[sliding_window]


def aligned(count: int) -> int:
    """Rounded up to the alignment."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@contextmanager
def using_caches(model: Any) -> Iterator[None]:
    """Let the model attend through caches inside the block, and through packed rows again after it."""
    AttentionInterface.register(CACHED_ATTENTION, cached_attention)
    with uncompiled(model):
        model.set_attn_implementation(CACHED_ATTENTION)
        try:
            yield
        finally:
            model.set_attn_implementation(PACKED_ATTENTION)


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_rows: CachedRows,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises:
        ModelError: the model needs something that packed rows do not do right.
    """
    rows, layer = packed_rows, int(module.layer_idx)  # type: ignore[arg-type]
    rows.cache.store(layer, key, value, rows.rows_T, rows.positions_T)
    if rows.prompts is not None:
        return packed_attention(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            packed_rows=rows.prompts,
            **kwargs,
        )
    mask_N11L = rows.mask(sliding_window, query)
    keys_NKLD, values_NKLD = rows.cache.first(layer, mask_N11L.shape[-1])
    num_rows, kv_heads, _, width = keys_NKLD.shape
    # heads that share keys become queries of one head, so that shared keys are read once
    query_NKGD = query[0].transpose(0, 1).reshape(num_rows, kv_heads, -1, width)
    if softcap is None:
        out_NKGD = functional.scaled_dot_product_attention(
            query_NKGD, keys_NKLD, values_NKLD, attn_mask=mask_N11L, scale=scaling
        )
    else:
        scale = width**-0.5 if scaling is None else scaling
        scores_NKGL = torch.tanh(query_NKGD @ keys_NKLD.transpose(-1, -2) * scale / softcap) * softcap
        out_NKGD = (
            functional.softmax(scores_NKGL + mask_N11L, dim=-1, dtype=torch.float32).to(query.dtype) @ values_NKLD
        )
    return out_NKGD.reshape(1, num_rows, -1, width), None
