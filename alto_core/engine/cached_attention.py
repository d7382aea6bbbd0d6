"""Keys and values of the rows that generate, in pages of one pool, and how a pass of generation attends.

Rows lie in one sequence [1, T], as in training. A prompt is read in one pass, all its tokens attending as in
`packed_attention`; after that a pass holds one token of every row, which sees what the row has stored. Nothing is
padded on the left, so an answer does not depend on the batch. A row takes as many pages as its prompt and answer may
fill, wherever they lie, so rows come and go without anything being moved.

Shape suffixes: T tokens of a pass, N rows of a pass, M pages of a row at most, F places of the pool, K key/value heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from alto_core.engine.packed_attention import RowLayout
from kernels.paged_attention import paged_attention
from kernels.pages import PAGE_PLACES

SPARE_PAGE = 0
"""Belongs to no row; rows that fill up a pass store there."""


class KeyValuePages:
    """The pool: a layer's keys and values, [F, K, D] each, are made when it first stores some.

    Args:
        num_pages: that rows may take.
    """

    def __init__(self, num_pages: int):
        self._num_places = (num_pages + 1) * PAGE_PLACES
        self._free = list(range(num_pages, SPARE_PAGE, -1))
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Numbers of so many free pages."""
        assert count <= len(self._free), "ask `num_free` first"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages of a row that has left."""
        self._free.extend(pages)

    def store(self, layer: int, key_KTD: Tensor, value_KTD: Tensor, places_T: Tensor) -> None:
        """Keep what a pass made, at these places of the pool."""
        if layer not in self._layers:
            heads, _, width = key_KTD.shape
            shape = (self._num_places, heads, width)
            self._layers[layer] = (key_KTD.new_empty(shape), value_KTD.new_empty(shape))
        for pool_FKD, new_KTD in zip(self._layers[layer], (key_KTD, value_KTD), strict=True):
            pool_FKD[places_T] = new_KTD.transpose(0, 1)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer. Places where nothing was stored hold anything."""
        return self._layers[layer]


def pages_for(places: int) -> int:
    """Pages that so many places take."""
    return -(-places // PAGE_PLACES)


def places_in_pool(pages_TM: Tensor, positions_T: Tensor) -> Tensor:
    """int64 [T], place of each token, from the pages of its row and its position there."""
    pages_T = pages_TM.gather(1, (positions_T // PAGE_PLACES)[:, None])[:, 0]
    return pages_T.long() * PAGE_PLACES + positions_T % PAGE_PLACES


@dataclass(kw_only=True, eq=False)  # not frozen: torch.compile looks into frozen ones, and compiles for each content
class CachedRows:
    """The layout of a pass of generation: every token's key and value are kept, then it attends."""

    cache: KeyValuePages
    places_T: Tensor
    """Where they are kept."""
    rows: RowLayout
    """How the tokens attend: prompts to themselves, latest tokens to what is kept."""

    def attend(
        self,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        *,
        layer: int | None,
        **options: Any,
    ) -> Tensor:
        """See `RowLayout`."""
        assert layer is not None, "decoder layers of transformers know their number"
        self.cache.store(layer, key_KTD, value_KTD, self.places_T)
        return self.rows.attend(query_HTD, key_KTD, value_KTD, layer=layer, **options)


@dataclass(frozen=True, kw_only=True, eq=False)
class LatestTokens:
    """One token of every row, in order, that sees what is kept of its row: T = N."""

    cache: KeyValuePages
    pages_NM: Tensor
    """int32, of each row."""
    counts_N: Tensor
    """int32, places that each row's token sees, its own included."""
    most_places: int
    """No count is larger."""

    def attend(
        self,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        layer: int | None,
    ) -> Tensor:
        """See `RowLayout`. Its own key and value are kept already."""
        assert layer is not None, "decoder layers of transformers know their number"
        keys_FKD, values_FKD = self.cache.of_layer(layer)
        return paged_attention(
            query_HTD.transpose(0, 1),
            keys_FKD,
            values_FKD,
            self.pages_NM,
            self.counts_N,
            most_places=self.most_places,
            scale=query_HTD.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window,
            softcap=softcap,
        )
