"""Segments as kernels see them: limits, overwriting for captured graphs, thresholds; and the table of tiles."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels.random_mask import drop_threshold
from kernels.segments import Segments, SegmentSpec, make_segments


def segments(*ranks: int, dropout: float = 0.0, limit: int | None = None) -> Segments:
    specs = [SegmentSpec(num_tokens=3, rank_start=8 * i, lora_rank=r, dropout=dropout) for i, r in enumerate(ranks)]
    return make_segments(specs, rank_limit=limit)


def test_rank_limit_is_the_largest_rank_or_what_was_asked_for() -> None:
    assert segments(3, 20).rank_limit == 20
    assert segments(3, 20).shrunk_width == 32
    assert segments(3, 20, limit=64).without({1}).rank_limit == 64
    assert segments(3, limit=16).repeated(2).rank_limit == 16
    with pytest.raises(ValueError, match="at most 16, but got 20"):
        segments(20, limit=16)


def test_thresholds_are_those_of_the_mask() -> None:
    stored = segments(4, dropout=0.7).dropout_thresholds_S
    assert stored.dtype == torch.int32
    assert stored.item() % 2**32 == drop_threshold(0.7) == round(0.7 * 2**32)


def test_overwriting_changes_what_kernels_read_in_place() -> None:
    captured, new = segments(3, 20, limit=64), segments(64, 5)
    addresses = [tensor.data_ptr() for tensor in captured.kernel_arguments]
    captured.overwrite_with(new)
    assert [tensor.data_ptr() for tensor in captured.kernel_arguments] == addresses
    for own, other in zip(captured.kernel_arguments, new.kernel_arguments, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("other", [segments(3), segments(3, 65), segments(3, 20, dropout=0.1)])
def test_segments_that_a_capture_does_not_cover_are_refused(other: Segments) -> None:
    with pytest.raises(ValueError, match="capture a graph for those"):
        segments(3, 20, limit=64).overwrite_with(other)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_table_of_tiles_covers_every_kernel_and_count_of_projections() -> None:
    from kernels.triton_tuning import choose_tiles, fit_width

    for kernel in ("shrink", "expand", "outer"):
        for num_tokens, width, projections in ((1, 1, 1), (700, 2048, 2), (6144, 3584, 3), (10**6, 28672, 1)):
            tiles = choose_tiles(kernel, num_tokens, width, projections)
            assert tiles.block_tokens >= 16 and tiles.block_width >= 16
            assert kernel == "shrink" or tiles.splits == 1
    assert choose_tiles("shrink", 768, 2048).splits > 1
    assert choose_tiles("shrink", 24576, 2048).splits == 1
    assert fit_width(128, 512, 4, 140_000) == 64
