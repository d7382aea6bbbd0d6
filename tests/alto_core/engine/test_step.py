"""One joint step: loss over all trained tokens of an update, jobs that cannot touch each other, steps in any cut."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alto_core.data.rows import TokenRow
from alto_core.engine.engine import Engine
from alto_core.engine.step import even_passes


def gradient(engine: Engine, job_id: str) -> torch.Tensor:
    return engine._of(job_id).block.grads_rW.clone()


def params(engine: Engine, job_id: str) -> torch.Tensor:
    return engine._of(job_id).block.params_rW.clone()


def everything(engine: Engine, job_id: str) -> list[torch.Tensor]:
    block = engine._of(job_id).block
    return [t.clone() for t in (block.params_rW, block.exp_avg_rW, block.exp_avg_sq_rW)]


def fill_b(engine: Engine, job_id: str, value: float = 0.05) -> None:
    """Away from zero, so that A gets a gradient in the first step."""
    active = engine._of(job_id)
    for _, _, b_rO in engine._slots.by_layer(active.block.params_rW, active.layers):
        b_rO.fill_(value)


def test_loss_is_the_sum_of_token_losses_over_the_trained_tokens(tiny: Any) -> None:
    rows, job = tiny.rows(3), tiny.job()
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        (record,) = tiny.step(engine, {job.job_id: rows})
    with torch.no_grad():
        expected = float(sum(tiny.loss_sums(tiny.plain_model(), rows))) / sum(row.num_labels for row in rows)
    assert record.train_loss == pytest.approx(expected, abs=1e-5)
    assert record.num_tokens == sum(len(row.token_ids) for row in rows)
    assert (record.job_id, record.step, record.learning_rate) == (job.job_id, 1, job.learning_rate)


def test_gradient_accumulation_equals_one_large_batch(tiny: Any) -> None:
    # L1: 2 and 10 trained tokens; a mean of means would weigh the short row five times too high.
    short = TokenRow(row_id=0, origin="", token_ids=(5, 6, 7), label_mask=(False, True, True))
    long = TokenRow(row_id=1, origin="", token_ids=tuple(range(10, 22)), label_mask=(False,) * 2 + (True,) * 10)
    results = []
    for size, accumulation in ((2, 1), (1, 2)):
        job = tiny.job(adapter_batch_size=size, gradient_accumulation=accumulation)
        with tiny.engine() as engine:
            engine.admit(job, tiny.budget())
            fill_b(engine, job.job_id)
            (record,) = tiny.step(engine, {job.job_id: [short, long]})
            results.append((record.train_loss, record.grad_norm, gradient(engine, job.job_id)))
    (loss_1, norm_1, grad_1), (loss_2, norm_2, grad_2) = results
    assert loss_1 == pytest.approx(loss_2, abs=1e-6)
    assert norm_1 == pytest.approx(norm_2, rel=1e-5)
    assert (grad_1 - grad_2).abs().max() < 1e-6


@pytest.mark.parametrize("max_pass_tokens", [1, 40, 10_000])
def test_cut_into_passes_changes_no_job(tiny: Any, max_pass_tokens: int) -> None:
    jobs = [tiny.job(lora_rank=rank, adapter_batch_size=rank, dropout=0.2) for rank in (1, 2, 4)]
    rows = tiny.rows(8)
    losses, grads = [], []
    for tokens in (None, max_pass_tokens):
        with tiny.engine(max_pass_tokens=tokens) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
                fill_b(engine, job.job_id)
            losses.append([r.train_loss for r in tiny.step(engine, {job.job_id: rows[:5] for job in jobs})])
            grads.append(torch.cat([gradient(engine, job.job_id) for job in jobs]))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert (grads[0] - grads[1]).abs().max() < 1e-6


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 100))
def test_passes_hold_every_part_once_within_their_tokens(sizes: list[int], max_tokens: int) -> None:
    passes = list(even_passes(sizes, max_tokens))
    assert [i for numbers in passes for i in numbers] == list(range(len(sizes)))
    assert all(len(numbers) == 1 or sum(sizes[i] for i in numbers) <= max_tokens for numbers in passes)
    assert len(passes) <= 1 or sum(sizes) > max_tokens


def test_passes_are_about_equally_large() -> None:
    cut = [sum([185, 160, 210][i % 3] for i in numbers) for numbers in even_passes([185, 160, 210] * 60, 16384)]
    assert len(cut) == 3
    assert max(cut) - min(cut) <= 210


def test_a_job_that_takes_no_part_does_not_move(tiny: Any) -> None:
    # L3: AdamW with zeroed gradients would still move it by its momentum.
    moving, resting = tiny.job(lora_rank=2), tiny.job(lora_rank=3, weight_decay=0.1)
    with tiny.engine() as engine:
        for job in (moving, resting):
            engine.admit(job, tiny.budget())
        tiny.step(engine, {job.job_id: tiny.rows(3) for job in (moving, resting)})
        before = everything(engine, resting.job_id)
        for _ in range(3):
            tiny.step(engine, {moving.job_id: tiny.rows(3)})
        assert all(torch.equal(b, a) for b, a in zip(before, everything(engine, resting.job_id), strict=True))
        assert engine._of(resting.job_id).step == 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_job_that_is_not_finite_leaves_its_neighbours_bit_for_bit(tiny: Any, family: str) -> None:
    # L3: the same step with and without the damage, so that all shapes are equal.
    jobs = [tiny.job(family, lora_rank=2), tiny.job(family, lora_rank=3), tiny.job(family, lora_rank=4)]
    damaged, rows = jobs[1].job_id, tiny.rows(4)
    results = []
    for damage in (False, True):
        with tiny.engine(family) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
                fill_b(engine, job.job_id)
            if damage:
                engine._of(damaged).block.params_rW.fill_(float("nan"))
            records = [tiny.step(engine, {job.job_id: rows for job in jobs}) for _ in range(3)]
            results.append((records, {job.job_id: everything(engine, job.job_id) for job in jobs}))
    (clean_records, clean), (records, state) = results
    for job in (jobs[0], jobs[2]):
        assert all(torch.equal(c, d) for c, d in zip(clean[job.job_id], state[job.job_id], strict=True))
    for clean_step, step in zip(clean_records, records, strict=True):
        assert (step[0], step[2]) == (clean_step[0], clean_step[2])
        assert math.isnan(step[1].train_loss)


@pytest.mark.parametrize("fault", ["exploding", "infinite", "bad rows"])
def test_a_fault_of_one_job_leaves_its_neighbours_bit_for_bit(tiny: Any, fault: str) -> None:
    """L3: a loss that explodes, weights that overflow, rows of garbage. All shapes are those without the fault."""
    sound = [tiny.job(lora_rank=2), tiny.job(lora_rank=4)]
    rows = tiny.rows(4)
    garbage = [dataclasses.replace(row, token_ids=(tiny.vocabulary - 1,) * len(row.token_ids)) for row in rows]
    results = []
    for is_faulty in (False, True):
        wild = tiny.job(lora_rank=3, max_grad_norm=0.0)
        if is_faulty and fault == "exploding":
            wild = dataclasses.replace(wild, learning_rate=1e6)
        with tiny.engine() as engine:
            for job in (sound[0], wild, sound[1]):
                engine.admit(job, tiny.budget())
            if is_faulty and fault == "infinite":
                fill_b(engine, wild.job_id, float("inf"))
            taught = {job.job_id: rows for job in (sound[0], wild, sound[1])}
            if is_faulty and fault == "bad rows":
                taught[wild.job_id] = garbage
            records = [tiny.step(engine, taught) for _ in range(4)]
            results.append(
                ([(step[0], step[2]) for step in records], [everything(engine, job.job_id) for job in sound], records)
            )
    (clean_curves, clean, clean_records), (curves, states, records) = results
    assert curves == clean_curves
    for before, after in zip(clean, states, strict=True):
        assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))
    ours, theirs = (step[-1][1].train_loss for step in (clean_records, records))
    assert not abs(ours - theirs) < 0.1, "the fault is meant to show in its own job"


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped(tiny: Any) -> None:
    job = tiny.job()
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        # Finite weights whose product overflows.
        fill_b(engine, job.job_id, 1e30)
        before = everything(engine, job.job_id)
        (record,) = tiny.step(engine, {job.job_id: tiny.rows(3)})
        assert not (math.isfinite(record.train_loss) and math.isfinite(record.grad_norm))
        assert all(torch.equal(b, a) for b, a in zip(before, everything(engine, job.job_id), strict=True))
        assert record.step == 1


def test_a_wild_learning_rate_harms_its_own_job_alone(tiny: Any) -> None:
    wild, good = tiny.job(learning_rate=1e6, lora_rank=2, max_grad_norm=0.0), tiny.job(lora_rank=3)
    curves = []
    for jobs in ([good], [wild, good]):
        with tiny.engine() as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
            curve = []
            for _ in range(5):
                curve.append(tiny.step(engine, {job.job_id: tiny.rows(3) for job in jobs})[-1].train_loss)
            curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


def test_every_lora_b_moves_within_two_steps(tiny: Any) -> None:
    # C7: nothing on the way cuts a layer off from its gradient.
    for family in ("llama", "gpt2", "gemma3"):
        job = tiny.job(family)
        with tiny.engine(family) as engine:
            engine.admit(job, tiny.budget())
            for _ in range(2):
                tiny.step(engine, {job.job_id: tiny.rows(3)})
            active = engine._of(job.job_id)
            for layer, _, b_rO in engine._slots.by_layer(active.block.params_rW, active.layers):
                assert b_rO.abs().max() > 0, f"{family}: {layer.name}"


def test_columns_of_layers_that_a_job_leaves_out_stay_exactly_zero(tiny: Any) -> None:
    job = tiny.job(target_modules=("q_proj", "down_proj"), weight_decay=0.1)
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        for _ in range(3):
            tiny.step(engine, {job.job_id: tiny.rows(3)})
        active = engine._of(job.job_id)
        others = [layer for layer in engine._slots.layers if layer not in active.layers]
        assert len(others) == 10
        for buffer in (active.block.params_rW, active.block.grads_rW, active.block.exp_avg_rW):
            for _, a_rI, b_rO in engine._slots.by_layer(buffer, others):
                assert not a_rI.any()
                assert not b_rO.any()


def test_bfloat16_backbone_still_moves_float32_adapters_by_small_rates(tiny: Any) -> None:
    # C6: a bfloat16 weight of 1 does not feel steps of 1e-4.
    job = tiny.job(learning_rate=1e-5)
    backbone = tiny.backbone(dtype="bfloat16")
    with Engine(backbone, target_modules=job.target_modules, num_slots=1, rank_rows=4) as engine:
        engine.admit(job, tiny.budget())
        before = params(engine, job.job_id)
        losses = [tiny.step(engine, {job.job_id: tiny.rows(3)})[0].train_loss for _ in range(2)]
        moved = params(engine, job.job_id) - before
    assert backbone.dtype == torch.bfloat16
    assert all(math.isfinite(loss) for loss in losses)
    assert moved.dtype == torch.float32
    assert 0 < moved.abs().max() < 1e-4


def test_rows_without_a_trained_token_are_refused(tiny: Any) -> None:
    job = tiny.job()
    row = TokenRow(row_id=0, origin="", token_ids=(5, 6), label_mask=(False, False))
    with tiny.engine() as engine:
        engine.admit(job, tiny.budget())
        for rows in ([], [row]):
            with pytest.raises(ValueError, match="trained tokens"):
                tiny.step(engine, {job.job_id: rows})


def test_a_micro_batch_without_labels_counts_nothing(tiny: Any) -> None:
    rows = [TokenRow(row_id=9, origin="", token_ids=(5, 6), label_mask=(False, False)), *tiny.rows(1)]
    losses = []
    for batch in (rows, rows[1:]):
        job = tiny.job(adapter_batch_size=1, gradient_accumulation=len(batch))
        with tiny.engine() as engine:
            engine.admit(job, tiny.budget())
            losses.append(tiny.step(engine, {job.job_id: batch})[0].train_loss)
    assert losses[0] == losses[1]
