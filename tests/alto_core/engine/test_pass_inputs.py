"""Passes of fixed shape: buckets, what a shape holds, and how the rest is filled up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alto_core.data.packing import pack_rows
from alto_core.engine.capture_choice import bucket
from alto_core.engine.pass_inputs import NOBODY, PassInputs, PassShape, shape_of
from kernels.segments import SegmentSpec

SHAPE = PassShape(tokens=64, labels=40, rows=9, segments=4, longest_row=16, lora_rank=8, has_dropout=False)


@given(st.integers(min_value=1, max_value=10**6))
def test_buckets_hold_their_count_and_waste_an_eighth_at_most(count: int) -> None:
    assert count <= bucket(count) < count + max(64, count / 8 + 1)
    assert bucket(bucket(count)) == bucket(count)


def test_a_shape_holds_smaller_passes_and_itself() -> None:
    exact = dataclasses.replace(SHAPE, rows=4)
    assert SHAPE.holds(exact) and exact.holds(exact)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 65},
        {"labels": 41},
        {"rows": 10},
        {"segments": 5},
        {"longest_row": 17},
        {"lora_rank": 9},
        {"has_dropout": True},
        # 60 tokens short: four more rows are needed to fill up.
        {"tokens": 4, "rows": 6},
    ],
)
def test_a_shape_does_not_hold_more_of_anything(change: dict[str, Any]) -> None:
    assert not SHAPE.holds(dataclasses.replace(SHAPE, **change))


def test_a_pass_is_filled_up_with_rows_and_labels_of_nobody(tiny: Any) -> None:
    inputs = PassInputs(SHAPE, torch.device("cpu"))
    for seed in (0, 1):  # the second time over what the first left
        rows = tiny.rows(3, seed=seed, longest=9)
        batch = pack_rows([rows[:1], rows[1:]])
        specs = [
            SegmentSpec(num_tokens=len(rows[0].token_ids), rank_start=2, lora_rank=3, scale=2.0),
            SegmentSpec(num_tokens=batch.num_tokens - len(rows[0].token_ids), rank_start=5, lora_rank=8, scale=1.0),
        ]
        needed = shape_of(batch, specs, lora_rank=8, has_dropout=False)
        assert SHAPE.holds(needed)
        count = len(batch.label_ids_P)
        weights, slots = np.full(count, 0.5, np.float32), np.arange(count, dtype=np.int32) % 2
        inputs.load(batch, specs, label_weights_P=weights, label_slots_P=slots)
        offsets = inputs.row_offsets_N1.tolist()
        assert offsets[:4] == batch.row_offsets_N1.tolist()
        assert offsets[-1] == SHAPE.tokens == sum(inputs.row_lengths)
        assert max(inputs.row_lengths) <= SHAPE.longest_row
        assert inputs.position_ids_T.max() < SHAPE.longest_row
        assert inputs.token_ids_T[: batch.num_tokens].tolist() == batch.token_ids_T.tolist()
        assert not inputs.token_ids_T[batch.num_tokens :].any()
        assert inputs.label_slots_P.tolist() == [*slots.tolist(), *[NOBODY] * (SHAPE.labels - count)]
        assert not inputs.label_weights_P[count:].any()
        assert inputs.segments.token_offsets_S1.tolist()[-3:] == [batch.num_tokens] * 3
        assert inputs.segments.ranks_S.tolist() == [3, 8, 0, 0]
        assert inputs.segments.num_tokens == SHAPE.tokens


@pytest.mark.parametrize("rows", range(9, 14))
def test_kernels_find_every_array_at_an_aligned_place(rows: int) -> None:
    """Else each length would make Triton compile all kernels anew."""
    inputs = PassInputs(dataclasses.replace(SHAPE, rows=rows, labels=37, segments=5), torch.device("cpu"))
    for tensor in (*inputs.segments.kernel_arguments, inputs.row_offsets_N1, inputs.label_ids_P, inputs.label_slots_P):
        assert tensor.data_ptr() % 16 == 0


def test_a_pass_without_any_rows_can_be_captured() -> None:
    inputs = PassInputs(SHAPE, torch.device("cpu"))
    nothing = np.zeros(0)
    inputs.load(pack_rows([]), (), label_weights_P=nothing.astype(np.float32), label_slots_P=nothing.astype(np.int32))
    assert inputs.row_lengths == (16, 16, 16, 16)
    assert (inputs.label_slots_P == NOBODY).all()
