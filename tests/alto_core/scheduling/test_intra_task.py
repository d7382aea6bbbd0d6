"""Who gets a slot: order, limits, backfill, and sizes found from the memory. Pure values."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto_core.scheduling.intra_task import (
    Capacity,
    JobSize,
    admission_order,
    admit,
    alone_bytes,
    plan_packing,
    without,
)
from alto_core.scheduling.memory_model import MemoryFit, MemoryModel, ModelShape, PassSize, fit_memory
from alto_core.scheduling.remedies import arithmetic, remedies

LLAMA_8B = ModelShape(
    num_parameters=8_030_261_248,
    element_bytes=2,
    num_layers=32,
    width=4096,
    query_width=4096,
    key_value_width=1024,
    mlp_width=14336,
    mlp_inputs=2,
    vocabulary=128256,
    adapted_columns=32 * 81920,
    adapted_layers=224,
    has_shadow=True,
    chunk_bytes=1 << 30,
)
GIB = 2**30


def job(name: str, *, batch: int = 4, rank: int = 16, length: float = 100.0) -> JobSize:
    return JobSize(job_id=name, adapter_batch_size=batch, lora_rank=rank, row_tokens=length, next_row_tokens=length)


def names(jobs: tuple[JobSize, ...]) -> list[str]:
    return [j.job_id for j in jobs]


ROOMY = Capacity(num_slots=9, rank_rows=1000, step_tokens=1e9)


def test_larger_batches_come_first() -> None:
    waiting = [job("a", batch=1), job("b", batch=8), job("c", batch=4)]
    assert names(admission_order(waiting)) == ["b", "c", "a"]


def test_a_freed_batch_size_comes_before_larger_ones_and_rows_of_like_length_before_others() -> None:
    waiting = [job("large", batch=8), job("far", batch=2, length=400), job("near", batch=2, length=110)]
    freed = job("gone", batch=2, length=100)
    assert names(admission_order(waiting, freed)) == ["near", "far", "large"]


@pytest.mark.parametrize(
    "capacity",
    [
        dataclasses.replace(ROOMY, num_slots=1),
        dataclasses.replace(ROOMY, rank_rows=31),
        dataclasses.replace(ROOMY, step_tokens=799.0),
    ],
)
def test_each_limit_keeps_the_second_job_out(capacity: Capacity) -> None:
    assert names(admit([job("a"), job("b")], (), capacity)) == ["a"]
    assert names(admit([job("a"), job("b")], (), ROOMY)) == ["a", "b"]


def test_a_job_that_does_not_fit_is_passed_over_for_one_that_does() -> None:
    capacity = dataclasses.replace(ROOMY, rank_rows=40)
    waiting = [job("a", batch=8, rank=32), job("b", batch=4, rank=32), job("c", batch=2, rank=8)]
    assert names(admit(waiting, (), capacity)) == ["a", "c"]


def test_a_job_without_a_place_takes_no_room() -> None:
    capacity = dataclasses.replace(ROOMY, num_slots=1)
    assert names(admit([job("a"), job("b")], (), capacity, place=lambda size: size.job_id != "a")) == ["b"]


def test_an_evicted_job_does_not_come_back_while_the_others_run() -> None:
    running = [job("b", batch=2), job("c", batch=2)]
    left = without(ROOMY, job("a", batch=8), running)
    assert not admit([job("a", batch=8)], running, left)
    assert names(admit([job("a", batch=8)], (), left)) == ["a"]


@given(
    st.lists(st.tuples(st.integers(1, 16), st.integers(1, 64), st.integers(1, 300)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(64, 200),
    st.integers(100, 5000),
)
def test_what_is_admitted_fits_and_what_is_left_does_not(
    made: list[tuple[int, int, int]], slots: int, rank_rows: int, tokens: int
) -> None:
    waiting = [job(str(i), batch=b, rank=r, length=n) for i, (b, r, n) in enumerate(made)]
    capacity = Capacity(num_slots=slots, rank_rows=rank_rows, step_tokens=tokens)
    admitted = admit(waiting, (), capacity)
    assert admitted and capacity.holds(admitted)
    assert not any(capacity.holds((*admitted, other)) for other in waiting if other not in admitted)


def test_arithmetic_meets_what_an_h200_measured() -> None:
    """16 jobs of ranks 16/32/64, 3,072 tokens, 2,112 labels: 62.16 GiB were allocated at the peak."""
    model = MemoryModel(shape=LLAMA_8B)
    peak = model.peak_bytes(rank_rows=576, size=PassSize(tokens=3072, labels=2112, lora_rank=64))
    assert peak / GIB == pytest.approx(62.16, rel=0.03)
    peak = model.peak_bytes(rank_rows=576, size=PassSize(tokens=6144, labels=4224, lora_rank=64))
    assert peak / GIB == pytest.approx(78.23, rel=0.03)


def test_recomputed_parts_take_less_and_their_remedy_is_named() -> None:
    size = PassSize(tokens=4096, labels=2048, lora_rank=16)
    shapes = [dataclasses.replace(LLAMA_8B, recomputed=part) for part in ("none", "mlp", "layers")]
    whole, without_mlp, layers = (shape.activation_bytes(size) for shape in shapes)
    assert layers < without_mlp < 0.5 * whole
    bounds = {"budget_bytes": 35 * GIB, "longest_row": 2048, "label_share": 0.5}
    found = remedies(MemoryModel(shape=LLAMA_8B), job("a", batch=4), **bounds)
    assert found == ("adapter_batch_size: 1", "data.max_length: 512", "activation_checkpointing: layers")
    assert "58.7 GiB, but 35 GiB may be used" in arithmetic(MemoryModel(shape=LLAMA_8B), job("a", batch=4), **bounds)


def test_a_model_that_does_not_fit_whole_is_offered_in_4_bits() -> None:
    shape = dataclasses.replace(LLAMA_8B, layer_parameters=32 * 218_112_000)
    packed = dataclasses.replace(shape, quantized_parameters=shape.layer_parameters)
    assert packed.backbone_bytes / GIB == pytest.approx(5.72, rel=0.01) and shape.backbone_bytes / GIB > 14.9
    bounds = {"budget_bytes": 12 * GIB, "longest_row": 512, "label_share": 0.5}
    assert remedies(MemoryModel(shape=shape), job("a", batch=1), **bounds) == ("model.quantization: nf4",)
    assert remedies(MemoryModel(shape=packed), job("a", batch=40), **bounds) != ()
    assert "model.quantization: nf4" not in remedies(MemoryModel(shape=packed), job("a", batch=40), **bounds)


def test_a_fit_finds_scale_and_fixed_part_and_tells_its_residual() -> None:
    sizes = [PassSize(tokens=tokens, labels=tokens // 2, lora_rank=16) for tokens in (200, 1000, 5000)]
    exact = [(size, round(1.2 * LLAMA_8B.activation_bytes(size) + 5e8)) for size in sizes]
    fit = fit_memory(LLAMA_8B, exact)
    assert fit.scale == pytest.approx(1.2) and fit.fixed_bytes == pytest.approx(5e8, rel=1e-3)
    assert fit.residual_bytes < 10
    off = fit_memory(LLAMA_8B, [*exact[:2], (sizes[2], exact[2][1] + 10**9)])
    assert off.residual_bytes > 10**6


def test_a_disturbed_measurement_gives_way_to_arithmetic() -> None:
    sizes = [PassSize(tokens=tokens, labels=10, lora_rank=16) for tokens in (200, 1000)]
    assert fit_memory(LLAMA_8B, [(sizes[0], 100), (sizes[1], 101)]).scale == 1.0
    assert fit_memory(LLAMA_8B, []) == MemoryFit()


def plan(jobs: list[JobSize], budget_gib: float, *, longest: int = 200, max_slots: int | None = None):
    return plan_packing(
        MemoryModel(shape=LLAMA_8B),
        jobs,
        budget_bytes=budget_gib * GIB,
        pass_tokens=16384,
        longest_row=longest,
        label_share=0.5,
        max_slots=max_slots,
    )


def test_a_plan_stays_within_its_memory_and_more_memory_holds_more_jobs() -> None:
    jobs = [job(str(i), batch=b, rank=r) for i, (b, r) in enumerate([(1, 16), (2, 32), (4, 64), (8, 16)] * 15)]
    slots = []
    for budget in (32, 40, 75, 138):
        packing = plan(jobs, budget)
        assert packing is not None and packing.peak_bytes <= budget * GIB and not packing.too_large
        slots.append(packing.capacity.num_slots)
    assert slots == sorted(slots) and slots[0] < slots[-1]
    limited = plan(jobs, 138, max_slots=3)
    assert limited is not None and limited.capacity.num_slots == 3


def test_jobs_that_fit_in_no_way_are_named_and_a_task_without_any_other_is_refused() -> None:
    small, large = job("small", batch=1), job("large", batch=64)
    packing = plan([small, large], 24)
    assert packing is not None and packing.too_large == ("large",)
    assert plan([large], 24) is None
    assert plan([small], 10) is None


def test_jobs_that_fit_alone_but_in_no_common_slots_still_train_some() -> None:
    wide, long = job("wide", batch=1, rank=128), job("long", batch=6, rank=1)
    model = MemoryModel(shape=LLAMA_8B)
    alone = max(alone_bytes(model, j, 200, 0.5) for j in (wide, long))
    packing = plan([wide, long], (alone + 1000) / GIB)
    assert packing is not None and len(packing.too_large) == 1
    assert packing.peak_bytes <= alone + 1000
