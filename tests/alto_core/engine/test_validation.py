"""Validation losses: the same numbers however rows and jobs are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from alto_core.data.rows import TokenRow
from alto_core.engine.engine import UNTUNED


def test_batching_does_not_change_any_row(tiny: Any) -> None:
    # L2: seven rows of uneven length, one of them without labels.
    rows = tiny.rows(6)
    rows.insert(2, TokenRow(row_id=99, origin="", token_ids=(5, 6, 7), label_mask=(False,) * 3))
    jobs = [tiny.job(lora_rank=rank) for rank in (2, 5)]
    with tiny.engine() as engine:
        for job in jobs:
            engine.admit(job, tiny.budget())
        for _ in range(3):
            tiny.step(engine, {job.job_id: rows for job in jobs})
        ids = [jobs[0].job_id, UNTUNED, jobs[1].job_id]
        results = [engine.evaluate(ids, rows, max_tokens=tokens) for tokens in (1, 25, 60, 10_000)]
        results.append({i: engine.evaluate([i], rows, max_tokens=40)[i] for i in ids})
    for result in results[1:]:
        for job_id in ids:
            assert result[job_id].loss_sums == pytest.approx(results[0][job_id].loss_sums, abs=1e-5)
            assert result[job_id].mean == pytest.approx(results[0][job_id].mean, abs=1e-6)
    losses = results[0]
    assert losses[UNTUNED].loss_sums[2] == 0.0
    assert losses[UNTUNED].num_labels == tuple(row.num_labels for row in rows)
    assert len({round(losses[job_id].mean, 4) for job_id in ids}) == 3


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_untuned_losses_equal_plain_transformers(tiny: Any, family: str) -> None:
    rows = tiny.rows(4)
    with tiny.engine(family) as engine:
        losses = engine.evaluate([UNTUNED], rows, max_tokens=30)[UNTUNED]
    with torch.no_grad():
        expected = [float(x) for x in tiny.loss_sums(tiny.plain_model(family), rows)]
    assert losses.loss_sums == pytest.approx(expected, abs=1e-4)


def test_rows_without_any_label_give_zero_and_no_pass(tiny: Any) -> None:
    row = TokenRow(row_id=0, origin="", token_ids=(5, 6), label_mask=(False, False))
    with tiny.engine() as engine:
        losses = engine.evaluate([UNTUNED], [row], max_tokens=10)[UNTUNED]
    assert (losses.loss_sums, losses.num_labels) == ((0.0,), (0,))


def test_a_damaged_job_does_not_enter_its_neighbours_validation(tiny: Any) -> None:
    jobs, rows = [tiny.job(lora_rank=2), tiny.job(lora_rank=3)], tiny.rows(4)
    with tiny.engine() as engine:
        for job in jobs:
            engine.admit(job, tiny.budget())
        tiny.step(engine, {job.job_id: rows for job in jobs})
        clean = engine.evaluate([job.job_id for job in jobs], rows, max_tokens=10_000)
        engine._of(jobs[0].job_id).block.params_rW.fill_(float("nan"))
        damaged = engine.evaluate([job.job_id for job in jobs], rows, max_tokens=10_000)
    assert damaged[jobs[1].job_id] == clean[jobs[1].job_id]
    assert damaged[jobs[0].job_id].mean != damaged[jobs[0].job_id].mean


def test_evaluation_and_generation_use_no_dropout_and_leave_no_gradient(tiny: Any) -> None:
    plain, dropped = tiny.job(), tiny.job(dropout=0.5)
    rows = tiny.rows(3)
    results = []
    for job in (plain, dropped):
        with tiny.engine() as engine:
            engine.admit(job, tiny.budget())
            active = engine._of(job.job_id)
            for _, _, b_rO in engine._slots.by_layer(active.block.params_rW, active.layers):
                b_rO.fill_(0.05)
            results.append(engine.evaluate([job.job_id], rows, max_tokens=100)[job.job_id].loss_sums)
            assert not active.block.grads_rW.any()
    assert results[0] == results[1]
