"""Attention over packed rows that do not see each other, registered with transformers as `alto_packed`.

All rows of a step lie in one sequence [1, T] with restarting positions. On CUDA in half precision flash attention takes
them as they lie (`RaggedRows`). Elsewhere (`PackedRows`) they are scattered into a right-padded batch, go through one
causal product there, and are gathered back: causality alone keeps the padding unseen, so no mask is built. Generation
has a layout of its own (`cached_attention`). The layout travels as the keyword argument `packed_rows` from the model's
forward to here; a model that loses it on the way is refused, never run with rows that see each other.

A row may begin with the prompt of the row before it, which stands in the pack once (see `shared_prompts`).

Shape suffixes: T tokens, E tokens with prefixes repeated, N rows, N1 = N + 1, L longest row, H heads, K key/value
heads, D head width.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from alto_core.engine.shared_prompts import SharedKeys, key_places
from alto_core.errors import ModelError

PACKED_ATTENTION = "alto_packed"


class RowLayout(Protocol):
    """Where the rows of a pass lie, and how they attend."""

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
        """Causal attention within each row, [T, H, D].

        Args:
            scaling: factor on the scores; None: 1 / sqrt(D).
            sliding_window: the latest so many tokens alone are seen; None: all.
            softcap: bound of the scores, as Gemma 2 has it; None: they are not bent.
            layer: number of the decoder layer, where the model tells it.
        """


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Where each token goes in a right-padded [N, L] batch."""

    lengths: tuple[int, ...]
    """Tokens of each row, in order; at least one row, none empty."""
    device: torch.device | str
    prefixes: tuple[int, ...] = ()
    """So many tokens at the start of the row before it come before each row's own; empty: none do."""
    padded_index_E: Tensor | None = field(init=False)
    """Place of each token in the flattened batch; None when all rows are equally long."""
    longest: int = field(init=False)
    """Tokens of the longest row, its prefix included."""
    _repeated: tuple[Tensor, Tensor] | None = field(init=False)
    """Token of each of the E, and which of the E each token is; None where no row has a prefix."""

    def __post_init__(self) -> None:
        whole, repeated, index = self.lengths, None, None
        if any(self.prefixes):
            whole = tuple(map(sum, zip(self.lengths, self.prefixes, strict=True)))
            places = key_places(self.lengths, self.prefixes)
            repeated = tuple(torch.from_numpy(part).to(self.device) for part in (places.source_K, places.own_T))
        longest = max(whole)
        if any(length != longest for length in whole):
            rows = torch.arange(len(whole)).repeat_interleave(torch.tensor(whole))
            starts = torch.tensor((0, *whole[:-1])).cumsum(0)
            index = (rows * longest + torch.arange(len(rows)) - starts[rows]).to(self.device)
        for name, value in (("padded_index_E", index), ("longest", longest), ("_repeated", repeated)):
            object.__setattr__(self, name, value)

    def scatter(self, x_HTD: Tensor) -> Tensor:
        """[H, T, D] -> [N, H, L, D], zeros in the padding."""
        num_heads, _, width = x_HTD.shape
        num_rows, longest = len(self.lengths), self.longest
        if self._repeated is not None:
            x_HTD = x_HTD.index_select(1, self._repeated[0])
        if self.padded_index_E is not None:
            x_HTD = x_HTD.new_zeros(num_heads, num_rows * longest, width).index_copy(1, self.padded_index_E, x_HTD)
        return x_HTD.reshape(num_heads, num_rows, longest, width).transpose(0, 1)

    def gather(self, x_NHLD: Tensor) -> Tensor:
        """[N, H, L, D] -> [T, H, D]; what a prefix gave a second time is left."""
        num_rows, num_heads, longest, width = x_NHLD.shape
        flat = x_NHLD.transpose(1, 2).reshape(num_rows * longest, num_heads, width)
        if self.padded_index_E is not None:
            flat = flat.index_select(0, self.padded_index_E)
        return flat if self._repeated is None else flat.index_select(0, self._repeated[1])

    def attend(
        self,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        layer: int | None = None,
    ) -> Tensor:
        """See `RowLayout`."""
        query_NHLD, key_NKLD, value_NKLD = (self.scatter(x) for x in (query_HTD, key_KTD, value_KTD))
        band_LL = _sliding_band(self.longest, sliding_window, query_HTD.device)
        if softcap is not None:
            out_NHLD = _softcapped(query_NHLD, key_NKLD, value_NKLD, scaling=scaling, softcap=softcap, band_LL=band_LL)
        else:
            out_NHLD = functional.scaled_dot_product_attention(
                query_NHLD,
                key_NKLD,
                value_NKLD,
                attn_mask=band_LL,
                is_causal=band_LL is None,
                scale=scaling,
                enable_gqa=query_HTD.shape[0] != key_KTD.shape[0],
            )
        return self.gather(out_NHLD)


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """Where the rows begin, read on the device: a captured CUDA graph serves whatever rows are written there."""

    offsets_N1: Tensor
    """int32, cumulative."""
    longest: int
    """No row has more tokens, its prefix included."""
    shared: SharedKeys | None = None
    """Of a pack in which rows have prefixes."""

    def attend(
        self,
        query_HTD: Tensor,
        key_KTD: Tensor,
        value_KTD: Tensor,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        layer: int | None = None,
    ) -> Tensor:
        """See `RowLayout`; half precision and plain scores only."""
        from torch.nn.attention.varlen import varlen_attn

        assert softcap is None, "flash attention bends no scores; such models take PackedRows"
        query_THD, key_TKD, value_TKD = (x.transpose(0, 1) for x in (query_HTD, key_KTD, value_KTD))
        window = -1 if sliding_window is None or sliding_window >= self.longest else sliding_window - 1
        # Releases without this argument take fewer key heads than query heads without being told.
        grouped: dict[str, Any] = (
            {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        )
        offsets, longest = self.offsets_N1, self.longest
        key_offsets = offsets
        if self.shared is not None:
            key_TKD, value_TKD = self.shared.repeated(key_TKD), self.shared.repeated(value_TKD)
            key_offsets = self.shared.offsets_N1
        out_THD = varlen_attn(
            query_THD, key_TKD, value_TKD, offsets, key_offsets, longest, longest,
            scale=scaling, window_size=(window, 0), **grouped,
        )  # fmt: skip
        assert isinstance(out_THD, Tensor)
        return out_THD


def shares_prompts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ragged rows may begin with another row's prompt: tried, since torch does not say how it places fewer
    queries than keys. Forward and backward of a pack with a prefix must be those of the same rows written out."""
    draw = torch.Generator().manual_seed(0)
    prompt, chosen, rejected = 5, 3, 4
    written_out = (prompt + chosen, prompt + rejected)
    places = key_places((prompt + chosen, rejected), (0, prompt))
    source_K, own_T, again_T = (torch.from_numpy(x).to(device) for x in (places.source_K, places.own_T, places.again_T))
    x_3HTD = torch.randn(3, 2, len(places.own_T), 64, generator=draw).to(device, dtype).requires_grad_(True)
    query, key, value = x_3HTD.unbind()
    shared = SharedKeys(source_K, own_T, again_T, torch.from_numpy(places.offsets_N1).to(device))
    offsets = torch.tensor([0, prompt + chosen, len(places.own_T)], dtype=torch.int32, device=device)
    plain = torch.tensor([0, *itertools.accumulate(written_out)], dtype=torch.int32, device=device)
    try:
        out_THD = RaggedRows(offsets, max(written_out), shared).attend(query, key, value)
    except RuntimeError:  # this release's way to say that it takes no such rows
        return False
    query, key, value = x_3HTD.index_select(2, source_K).unbind()
    expected_THD = RaggedRows(plain, max(written_out)).attend(query, key, value)
    expected_THD = expected_THD.index_select(0, own_T)
    (gradient,) = torch.autograd.grad(out_THD.float().square().sum(), x_3HTD)
    (expected_gradient,) = torch.autograd.grad(expected_THD.float().square().sum(), x_3HTD)
    return torch.allclose(out_THD, expected_THD, atol=0.02, rtol=0.02) and torch.allclose(
        gradient, expected_gradient, atol=0.05, rtol=0.05
    )


def register_packed_attention() -> None:
    """Make `attn_implementation="alto_packed"` known to transformers. Doing it again changes nothing."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


@torch.compiler.disable
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed_rows: RowLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D].

    Raises:
        ModelError: the model needs something that packing does not do right, or lost `packed_rows`.
    """
    _refuse_unsupported(module, attention_mask, packed_rows, kwargs)
    assert packed_rows is not None
    assert dropout == 0.0, "the backbone is frozen and in eval mode"
    out_THD = packed_rows.attend(
        query[0],
        key[0],
        value[0],
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        layer=getattr(module, "layer_idx", None),
    )
    return out_THD[None], None


def _refuse_unsupported(
    module: nn.Module, mask: Tensor | None, packed_rows: RowLayout | None, kwargs: dict[str, Any]
) -> None:
    name = type(module).__name__
    if packed_rows is None:
        raise ModelError(
            f"{name} does not hand the row layout on to its attention, so rows cannot be packed. Use another model."
        )
    for argument in ("s_aux", "position_bias"):
        if kwargs.get(argument) is not None:
            raise ModelError(
                f"{name} uses {argument!r} in its attention, which packed rows do not support. Use another model."
            )
    is_causal = kwargs.get("is_causal")
    if mask is not None or not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ModelError(f"{name} does not attend causally with no mask, which packed rows need. Use another model.")


def _sliding_band(longest: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """bool [L, L], true where a query sees a key: itself and the `sliding_window - 1` before it. None: no need."""
    if sliding_window is None or sliding_window >= longest:
        return None
    ones_LL = torch.ones(longest, longest, dtype=torch.bool, device=device)
    return ones_LL.tril() & ones_LL.triu(1 - sliding_window)


def _softcapped(
    query_NHLD: Tensor,
    key_NKLD: Tensor,
    value_NKLD: Tensor,
    *,
    scaling: float | None,
    softcap: float,
    band_LL: Tensor | None,
) -> Tensor:
    """Attention with scores bent by softcap * tanh(score / softcap), as Gemma 2 does it; no fused product has that."""
    groups = query_NHLD.shape[1] // key_NKLD.shape[1]
    key_NHLD, value_NHLD = key_NKLD.repeat_interleave(groups, dim=1), value_NKLD.repeat_interleave(groups, dim=1)
    scale = query_NHLD.shape[-1] ** -0.5 if scaling is None else scaling
    scores_NHLL = torch.tanh(query_NHLD @ key_NHLD.transpose(-1, -2) * scale / softcap) * softcap
    longest = scores_NHLL.shape[-1]
    if band_LL is None:
        band_LL = torch.ones(longest, longest, dtype=torch.bool, device=scores_NHLL.device).tril()
    scores_NHLL = scores_NHLL.masked_fill(~band_LL, float("-inf"))
    return functional.softmax(scores_NHLL, dim=-1, dtype=torch.float32).to(value_NHLD.dtype) @ value_NHLD
