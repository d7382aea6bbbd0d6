"""Keys and values of rows that begin with another row's prompt: which tokens a row attends to, laid side by side.

A pair's prompt stands once in the pack, so all products of the model see it once. Attention alone needs the prompt's
keys and values before each of its two answers: they are repeated for it, and their gradients added up again. Queries
are not repeated: the rejected answer's queries are fewer than its keys and stand at the end of them.

Shape suffixes: T tokens of the pack, K keys (T and the shared tokens again), N1 = rows + 1, H heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

ABSENT = -1
"""Second place of a token that is not shared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyPlaces:
    """Where the keys of a pack come from, on the host."""

    source_K: NDArray[np.int64]
    """Token of each key: row after row, its prefix and then itself."""
    own_T: NDArray[np.int64]
    """Key of each token in its own row."""
    again_T: NDArray[np.int64]
    """Key of each token in the row behind, or `ABSENT`."""
    offsets_N1: NDArray[np.int32]
    """Cumulative keys of the rows."""


def key_places(row_lengths: Sequence[int], row_prefixes: Sequence[int]) -> KeyPlaces:
    """Lay out the keys of rows whose prefixes are the first tokens of the row before."""
    lengths, prefixes = np.array(row_lengths, dtype=np.int64), np.array(row_prefixes, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    offsets = np.concatenate(([0], np.cumsum(lengths + prefixes)))
    num_tokens = int(lengths.sum())
    # A token's key stands as far behind the token as prefixes have come before it.
    own = np.arange(num_tokens) + np.repeat(np.cumsum(prefixes), lengths)
    source = np.empty(int(offsets[-1]), dtype=np.int64)
    source[own] = np.arange(num_tokens)
    again = np.full(num_tokens, ABSENT, dtype=np.int64)
    for row in np.flatnonzero(prefixes):
        tokens = starts[row - 1] + np.arange(prefixes[row])
        keys = offsets[row] + np.arange(prefixes[row])
        source[keys], again[tokens] = tokens, keys
    return KeyPlaces(source_K=source, own_T=own, again_T=again, offsets_N1=offsets.astype(np.int32))


@dataclass(frozen=True, eq=False)
class SharedKeys:
    """`KeyPlaces` on the device; tensors of fixed size may hold more keys than there are, which nobody attends to."""

    source_K: Tensor
    own_T: Tensor
    again_T: Tensor
    offsets_N1: Tensor

    def repeated(self, x_THD: Tensor) -> Tensor:
        """[T, H, D] -> [K, H, D]; the gradient of a shared token is the sum over its two places."""
        repeated = _Repeated.apply(x_THD, self.source_K, self.own_T, self.again_T)
        assert isinstance(repeated, Tensor)
        return repeated


class _Repeated(torch.autograd.Function):
    """`index_select` whose backward reads instead of adding: no atomics, and no key that nobody attends to is read."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, source_K: Tensor, own_T: Tensor, again_T: Tensor) -> Tensor:
        ctx.save_for_backward(own_T, again_T)
        return x_THD.index_select(0, source_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_KHD: Tensor) -> tuple[Tensor | None, ...]:
        own_T, again_T = ctx.saved_tensors
        second_THD = d_KHD.index_select(0, again_T.clamp(min=0))
        is_shared_T = (again_T != ABSENT)[:, None, None]
        # Masked, not multiplied by 0: what stands at key 0 may be no number.
        return d_KHD.index_select(0, own_T) + second_THD.masked_fill(~is_shared_T, 0.0), None, None, None
