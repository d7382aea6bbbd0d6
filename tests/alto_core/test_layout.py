"""Whole backbones or parts of them, and on how many devices: arithmetic over the shapes of real models."""

from __future__ import annotations

import dataclasses

import pytest

from alto_core.domain import LoraJob
from alto_core.errors import EngineError
from alto_core.profiling import Layout, PackingQuestion, TaskRows
from alto_core.scheduling.memory_model import MemoryModel, ModelShape

GIB = 2**30
QWEN_32B = ModelShape(
    num_parameters=32_763_876_352,
    element_bytes=2,
    num_layers=64,
    width=5120,
    query_width=5120,
    key_value_width=1024,
    mlp_width=27648,
    mlp_inputs=2,
    vocabulary=152064,
    adapted_columns=64 * 131_072,
    adapted_layers=448,
    has_shadow=True,
    chunk_bytes=1 << 30,
    layer_parameters=31_206_735_872,
)
LARGE = MemoryModel(shape=QWEN_32B)
SMALL = MemoryModel(
    shape=dataclasses.replace(QWEN_32B, num_parameters=8_000_000_000, layer_parameters=7_000_000_000, num_layers=32)
)


def question(gib: float, num_jobs: int = 8, max_slots: int | None = None) -> PackingQuestion:
    jobs = [
        LoraJob(
            learning_rate=1e-4,
            lora_rank=8,
            lora_alpha=16.0,
            adapter_batch_size=2,
            target_modules=("q_proj",),
            seed=seed,
        )
        for seed in range(num_jobs)
    ]
    rows = TaskRows(mean=256.0, longest=256, label_share=0.7)
    return PackingQuestion(jobs=jobs, rows=rows, budget_bytes=gib * GIB, device_type="cuda", max_slots=max_slots)


def test_a_rank_of_a_divided_model_holds_its_part_and_what_it_gathers() -> None:
    whole, half = (Layout(num_ranks=2, sharded=s).shape(QWEN_32B).backbone_bytes / GIB for s in (False, True))
    assert whole == pytest.approx(61.0, abs=0.1)
    layers, rest = 31.207e9 * 2 / GIB, 1.557e9 * 2 / GIB
    assert half == pytest.approx(rest + layers / 2 + 3 * layers / 64, abs=0.1)


@pytest.mark.parametrize(
    ("model", "gib", "asked", "available", "expected"),
    [
        (SMALL, 130, 2, 2, Layout(num_ranks=2)),  # it fits each: nothing is divided
        (SMALL, 130, 4, 2, Layout(num_ranks=2)),  # fewer are there
        (SMALL, 130, None, 8, Layout(num_ranks=1)),  # auto: one holds all
        (LARGE, 130, 2, 2, Layout(num_ranks=2)),
        (LARGE, 55, 2, 2, Layout(num_ranks=2, sharded=True)),
        (LARGE, 55, None, 8, Layout(num_ranks=2, sharded=True)),  # auto: the fewest that hold it
        (LARGE, 32, None, 8, Layout(num_ranks=4, sharded=True)),
        (LARGE, 55, 1, 8, Layout(num_ranks=1)),
    ],
)
def test_the_layout_follows_the_memory(
    model: MemoryModel, gib: float, asked: int | None, available: int, expected: Layout
) -> None:
    asking = question(gib)
    layout = asking.choose_layout(model, asked=asked, available=available)
    assert layout == expected
    if asked != 1:
        plan = asking.plan(model, layout)
        assert not plan.too_large and plan.peak_bytes <= gib * GIB


def test_more_devices_than_jobs_are_of_use_only_to_divide_the_model() -> None:
    assert question(130, num_jobs=3).choose_layout(SMALL, asked=8, available=8) == Layout(num_ranks=3)
    divided = question(55, num_jobs=1).choose_layout(LARGE, asked=4, available=8)
    assert divided == Layout(num_ranks=4, sharded=True)


def test_ranks_have_equal_room_and_together_that_of_all_jobs() -> None:
    alone, both = (question(130).plan(SMALL, Layout(num_ranks=count)) for count in (1, 2))
    assert alone.capacity.num_slots == both.capacity.num_slots == 8
    assert both.capacity.rank_rows == alone.capacity.rank_rows == 64
    assert both.peak_bytes < alone.peak_bytes
    limited = question(130, max_slots=5).plan(SMALL, Layout(num_ranks=2))
    assert limited.capacity.num_slots == 6, "three on each: equal room"


def test_what_no_layout_holds_is_refused_with_the_arithmetic_of_the_most_devices() -> None:
    asking = question(4)
    layout = asking.choose_layout(LARGE, asked=None, available=8)
    assert layout == Layout(num_ranks=8, sharded=True)
    with pytest.raises(EngineError, match="not enough memory for the smallest job"):
        asking.plan(LARGE, layout)
