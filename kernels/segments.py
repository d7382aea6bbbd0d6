"""Which tokens belong to which adapter in one step, and where that adapter's rank rows lie.

All adapters share one set of rank rows: an adapter of rank r owns r neighbouring rows of every A and B. Tokens of one
adapter are neighbours too. So a segment is two ranges and three numbers, and no adapter is padded to a larger rank.

Shape suffixes, here and in the whole package: T tokens, S segments, S1 = S + 1, R rank rows of all adapters, r rank
rows of one adapter, t tokens of one segment, I input width of a linear layer, O output width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.random_mask import drop_threshold


@dataclass(frozen=True, kw_only=True)
class SegmentSpec:
    """One adapter's share of a step, as the caller knows it."""

    num_tokens: int
    """Zero for an adapter that has no rows in this step."""
    rank_start: int = 0
    """First of the adapter's rank rows."""
    lora_rank: int = 0
    """Zero for tokens that pass the base layer alone."""
    scale: float = 0.0
    """Factor on the LoRA path: alpha / r, or alpha / sqrt(r)."""
    dropout: float = 0.0
    """Probability in [0, 1) that an element of the layer's input is dropped."""
    dropout_seed: int = 0
    """32 bits from `random_mask.segment_seed`; used when `dropout` is above 0."""


@dataclass(frozen=True, kw_only=True)
class HostSegment(SegmentSpec):
    """A segment with its place among the tokens, for code that runs on the host."""

    token_start: int

    @property
    def is_active(self) -> bool:
        """Whether it adds anything: it has tokens and an adapter."""
        return self.num_tokens > 0 and self.lora_rank > 0

    @property
    def tokens(self) -> slice:
        return slice(self.token_start, self.token_start + self.num_tokens)

    @property
    def rank_rows(self) -> slice:
        return slice(self.rank_start, self.rank_start + self.lora_rank)


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """All segments of a step, twice: as device tensors for kernels, as plain values for the torch twin (no sync)."""

    token_offsets_S1: Tensor
    """int32, cumulative; segment s holds the tokens from entry s up to entry s + 1."""
    rank_offsets_S: Tensor
    """int32."""
    ranks_S: Tensor
    """int32."""
    scales_S: Tensor
    """float32."""
    dropout_S: Tensor
    """float32."""
    dropout_thresholds_S: Tensor
    """int32, the bit pattern of the unsigned number below which `random_mask` drops."""
    dropout_seeds_S: Tensor
    """int32, the bit pattern of an unsigned seed."""
    num_tokens: int
    """Tokens of the layer's input: all segments' and, in a step of fixed size, those behind them that fill it up."""
    has_dropout: bool
    """Whether kernels make masks at all."""
    on_host: tuple[HostSegment, ...]
    """Empty where the device tensors are overwritten from step to step; then only kernels can run."""
    rank_limit: int
    """No segment's rank is larger, also after `overwrite_with`. Kernels lay out their grids by it."""

    @property
    def count(self) -> int:
        return len(self.ranks_S)

    @property
    def shrunk_width(self) -> int:
        """Columns of a buffer that holds x A^T of any segment: the rank limit, rounded up to 16."""
        return -(-self.rank_limit // 16) * 16

    @property
    def kernel_arguments(self) -> tuple[Tensor, ...]:
        """What kernels read on the device, in the order in which they take it."""
        where = (self.token_offsets_S1, self.rank_offsets_S, self.ranks_S)
        return (*where, self.scales_S, self.dropout_S, self.dropout_thresholds_S, self.dropout_seeds_S)

    def overwrite_with(self, other: Segments) -> None:
        """Copy the other segments' device tensors into these, for a captured CUDA graph that reads them.

        The plain values stay as they were: only kernels may run on these segments afterwards.

        Raises:
            ValueError: the other has another number of segments, a larger rank, or dropout where these have none.
        """
        if other.count != self.count or other.rank_limit > self.rank_limit or other.has_dropout > self.has_dropout:
            raise ValueError(
                f"expected {self.count} segments of rank {self.rank_limit} at most"
                f"{'' if self.has_dropout else ' without dropout'}, but got {other.count} of rank {other.rank_limit}"
                f"{' with dropout' if other.has_dropout else ''}: capture a graph for those"
            )
        for own, new in zip(self.kernel_arguments, other.kernel_arguments, strict=True):
            own.copy_(new)

    @property
    def active(self) -> tuple[HostSegment, ...]:
        """The segments that add anything."""
        return tuple(s for s in self.on_host if s.is_active)

    def differ_in_ranks_only(self, other: Segments) -> bool:
        """Whether each segment of the other is the same, or one of the two has no adapter: what `without` leaves."""
        if self is other:
            return True
        pairs = zip(self.on_host, other.on_host, strict=False)
        return (
            self.count == other.count
            and self.rank_limit == other.rank_limit
            and all(
                a == b or (0 in (a.lora_rank, b.lora_rank) and dataclasses.replace(a, lora_rank=b.lora_rank) == b)
                for a, b in pairs
            )
        )

    def without(self, excluded: Collection[int]) -> Segments:
        """The same tokens, but the segments of these indices pass the base layer alone."""
        specs = [dataclasses.replace(s, lora_rank=0) if i in excluded else s for i, s in enumerate(self.on_host)]
        return make_segments(specs, self.token_offsets_S1.device, rank_limit=self.rank_limit)

    def repeated(self, tokens_per_row: int) -> Segments:
        """Segments made over rows, seen over tokens: every row becomes that many tokens ([B, L, width] inputs)."""
        specs = [dataclasses.replace(s, num_tokens=s.num_tokens * tokens_per_row) for s in self.on_host]
        return make_segments(specs, self.token_offsets_S1.device, rank_limit=self.rank_limit)


def make_segments(
    specs: Sequence[SegmentSpec], device: torch.device | str = "cpu", *, rank_limit: int | None = None
) -> Segments:
    """Lay the segments out one after another.

    Args:
        specs: in the order of their tokens; empty ones are allowed.
        device: where the tensors go.
        rank_limit: the largest rank that these segments may ever get; None: the largest of `specs`.

    Raises:
        ValueError: a count is negative, a dropout is outside [0, 1), or a rank is above the limit.
    """
    placed, start = [], 0
    for spec in specs:
        if min(spec.num_tokens, spec.lora_rank, spec.rank_start) < 0:
            raise ValueError(f"segment counts must be 0 or more, but got {spec}")
        if not 0 <= spec.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), but got {spec.dropout}")
        values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(SegmentSpec)}
        placed.append(HostSegment(**values, token_start=start))
        start += spec.num_tokens
    largest = max((s.lora_rank for s in placed), default=0)
    if rank_limit is not None and largest > rank_limit:
        raise ValueError(f"ranks must be at most {rank_limit}, but got {largest}")

    def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Segments(
        token_offsets_S1=column([*(s.token_start for s in placed), start], torch.int32),
        rank_offsets_S=column([s.rank_start for s in placed], torch.int32),
        ranks_S=column([s.lora_rank for s in placed], torch.int32),
        scales_S=column([s.scale for s in placed], torch.float32),
        dropout_S=column([s.dropout for s in placed], torch.float32),
        dropout_thresholds_S=column([_as_signed(drop_threshold(s.dropout)) for s in placed], torch.int32),
        dropout_seeds_S=column([_as_signed(s.dropout_seed) for s in placed], torch.int32),
        num_tokens=start,
        has_dropout=any(s.dropout for s in placed),
        on_host=tuple(placed),
        rank_limit=max(1, largest if rank_limit is None else rank_limit),
    )


def _as_signed(bits: int) -> int:
    return bits - (1 << 32) if bits >= 1 << 31 else bits
