"""The captured step on a GPU: against the same operations one by one, against the CPU, alone and among others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from alto_core.domain import LoraJob, StepRecord
from alto_core.engine.capture_choice import PassKind
from alto_core.engine.engine import Engine
from alto_core.engine.layer_probe import measure_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
    # torch warns of its own deprecations while it compiles.
    pytest.mark.filterwarnings("default"),
]

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2")
TOLERANCE = 4e-2
"""Nats per token, of losses near 5: a bfloat16 model against the same weights in float32."""


@contextmanager
def engine_of(
    tiny: Any, family: str = "llama", *, device: str = "cuda", quantization: str = "none", **changes: Any
) -> Iterator[Engine]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {"target_modules": tiny.targets(family), "num_slots": 6, "rank_rows": 160, "max_row_tokens": 14, **changes}
    backbone = tiny.backbone(family, device=device, dtype=dtype, quantization=quantization)
    with Engine(backbone, max_lora_rank=64, **sizes) as engine:
        yield engine


def jobs_of(tiny: Any, family: str = "llama", **changes: Any) -> list[LoraJob]:
    sizes = ((4, 1), (16, 3), (20, 4))
    return [tiny.job(family, lora_rank=rank, adapter_batch_size=size, **changes) for rank, size in sizes]


def curves(tiny: Any, engine: Engine, jobs: list[LoraJob], steps: int = 6) -> dict[str, list[float]]:
    """Losses of each job over a few updates on the same rows, which it is to learn by heart."""
    rows = tiny.rows(9)
    for job in jobs:
        engine.admit(job, tiny.budget())
    for _ in range(steps):
        engine.step({job.job_id: tiny.batch(job, 1, rows) for job in jobs})
    losses: dict[str, list[float]] = {job.job_id: [] for job in jobs}
    for record in engine.take_records():
        losses[record.job_id].append(record.train_loss)
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_equals_one_by_one_and_the_cpu(tiny: Any, family: str) -> None:
    check_against_the_cpu(tiny, family)


def test_captured_equals_one_by_one_and_the_cpu_in_4_bits(tiny: Any) -> None:
    pytest.importorskip("bitsandbytes")
    check_against_the_cpu(tiny, "llama", quantization="nf4")


def check_against_the_cpu(tiny: Any, family: str, quantization: str = "none") -> None:
    jobs = jobs_of(tiny, family)
    with engine_of(tiny, family, quantization=quantization) as engine:
        captured = curves(tiny, engine, jobs)
        held_out = engine.evaluate([job.job_id for job in jobs], tiny.rows(5, seed=3), max_tokens=40)
        assert engine._runner.num_captures > 0
    with engine_of(tiny, family, quantization=quantization, cuda_graph=False) as engine:
        one_by_one = curves(tiny, engine, jobs)
        assert engine._runner.num_captures == 0
    with engine_of(tiny, family, quantization=quantization, device="cpu") as engine:
        on_cpu = curves(tiny, engine, jobs)
        held_out_on_cpu = engine.evaluate([job.job_id for job in jobs], tiny.rows(5, seed=3), max_tokens=40)
    for job in jobs:
        assert captured[job.job_id] == pytest.approx(one_by_one[job.job_id], abs=TOLERANCE / 2)
        assert captured[job.job_id] == pytest.approx(on_cpu[job.job_id], abs=TOLERANCE)
        assert held_out[job.job_id].mean == pytest.approx(held_out_on_cpu[job.job_id].mean, abs=TOLERANCE)
        assert on_cpu[job.job_id][-1] < on_cpu[job.job_id][0] - 0.1, "wrong gradients would show"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_alone_equals_among_others(tiny: Any, dropout: float) -> None:
    jobs = jobs_of(tiny, dropout=dropout)
    with engine_of(tiny) as engine:
        together = curves(tiny, engine, jobs)
    for job in jobs:
        with engine_of(tiny) as engine:
            assert curves(tiny, engine, [job])[job.job_id] == pytest.approx(together[job.job_id], abs=TOLERANCE / 2)


def test_variants_equal_the_cpu_alone_and_among_others(tiny: Any) -> None:
    jobs = [
        tiny.job(lora_rank=4),
        tiny.job(lora_rank=5, lora_plus_ratio=4.0, train="b_only"),
        tiny.job(lora_rank=4, init="pissa", learning_rate=1e-3),
        tiny.job(lora_rank=4, layer_share=0.5, rank_allocation="gradient"),
        tiny.job(lora_rank=3, init="tlora", train="b_only", rank_allocation="sensitivity"),
    ]
    with engine_of(tiny, device="cpu") as engine:
        model = tiny.backbone(device="cpu", dtype="float32").model
        measures = measure_layers(engine, model, tiny.targets(), tiny.rows(6, seed=5), num_directions=8)
    with engine_of(tiny, device="cpu", measures=measures) as engine:
        on_cpu = curves(tiny, engine, jobs)
    with engine_of(tiny, measures=measures) as engine:
        together = curves(tiny, engine, jobs)
        assert engine._runner.num_captures > 0
    for job in jobs:
        assert together[job.job_id] == pytest.approx(on_cpu[job.job_id], abs=TOLERANCE)
        with engine_of(tiny, measures=measures) as engine:
            assert curves(tiny, engine, [job])[job.job_id] == pytest.approx(together[job.job_id], abs=TOLERANCE / 2)


def test_measures_equal_the_cpus(tiny: Any) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with engine_of(tiny, device=device, cuda_graph=False) as engine:
            dtype = "bfloat16" if device == "cuda" else "float32"
            model = tiny.backbone(device=device, dtype=dtype).model
            found.append(measure_layers(engine, model, tiny.targets(), tiny.rows(6, seed=5), num_directions=2))
    for name, on_cpu in found[0].items():
        assert found[1][name].gradient == pytest.approx(on_cpu.gradient, rel=0.1)
        assert found[1][name].sensitivity == pytest.approx(on_cpu.sensitivity, rel=0.1)


def test_several_passes_equal_one(tiny: Any) -> None:
    jobs = [
        tiny.job(lora_rank=rank, adapter_batch_size=2, gradient_accumulation=accumulation)
        for rank, accumulation in ((4, 1), (16, 3))
    ]
    with engine_of(tiny) as engine:
        whole = curves(tiny, engine, jobs)
    with engine_of(tiny, max_pass_tokens=20) as engine:
        cut = curves(tiny, engine, jobs)
    for job in jobs:
        assert cut[job.job_id] == pytest.approx(whole[job.job_id], abs=TOLERANCE / 2)


def test_jobs_that_come_and_go_capture_nothing_anew(tiny: Any) -> None:
    rows = tiny.rows(4, shortest=10, longest=10)
    first, second, third = (tiny.job(lora_rank=rank, learning_rate=rank * 1e-3) for rank in (4, 16, 33))
    with engine_of(tiny) as engine:
        engine.admit(first, tiny.budget())
        engine.admit(second, tiny.budget())
        engine.step({job.job_id: rows[:3] for job in (first, second)})
        made = engine._runner.num_captures
        engine.evict(first.job_id)
        engine.admit(third, tiny.budget())
        for _ in range(3):
            engine.step({job.job_id: rows[:3] for job in (second, third)})
        assert engine._runner.num_captures == made
        after = [record.train_loss for record in engine.take_records() if record.job_id == third.job_id]
    with engine_of(tiny) as engine:
        engine.admit(third, tiny.budget())
        for _ in range(3):
            engine.step({third.job_id: rows[:3]})
        assert [record.train_loss for record in engine.take_records()] == pytest.approx(after, abs=TOLERANCE / 2)


def test_a_pass_of_another_size_compiles_no_kernel(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it takes the same tiles; where an array begins must not select another variant."""
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    job = tiny.job(lora_rank=8, adapter_batch_size=64)
    with engine_of(tiny, rank_rows=8, num_slots=1) as engine:
        engine.admit(job, tiny.budget())
        for count in (6, 12):  # torch.compile makes its kernels for one size first, and for any size at the second
            engine.step({job.job_id: tiny.rows(count, shortest=14)})
        compiled.clear()
        for count in (19, 25, 31, 38):
            engine.step({job.job_id: tiny.rows(count, shortest=14)})
        assert engine._runner.num_captures > 2
    assert not compiled


def test_an_engine_with_other_slots_compiles_no_kernel(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a gate, when fewer jobs go on."""
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    jobs = [tiny.job(lora_rank=rank, adapter_batch_size=40) for rank in (4, 16)]
    for slots in (40, 2):
        compiled.clear()
        with engine_of(tiny, num_slots=slots) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
            for count in (10, 20):
                engine.step({job.job_id: tiny.rows(count, shortest=14) for job in jobs})
    assert not compiled


def test_a_smaller_pass_is_filled_up_to_a_captured_one(tiny: Any) -> None:
    job, rows = tiny.job(adapter_batch_size=40), tiny.rows(40)
    losses: list[list[float]] = []
    for counts in ((40, 12, 3, 25), (3, 12, 25, 40)):
        with engine_of(tiny) as engine:
            for count in counts:
                engine.admit(job, tiny.budget())
                engine.step({job.job_id: rows[:count]})
                engine.evict(job.job_id)
            by_count = dict(zip(counts, (record.train_loss for record in engine.take_records()), strict=True))
            losses.append([by_count[count] for count in sorted(counts)])
            assert (engine._runner.num_captures == 1) == (counts[0] == max(counts))
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE / 2)


def test_each_capture_tells_what_it_took(tiny: Any) -> None:
    job, rows = tiny.job(), tiny.rows(3)
    with engine_of(tiny) as engine:
        engine.admit(job, tiny.budget())
        for _ in range(2):
            engine.step({job.job_id: rows})
        engine.evaluate([job.job_id], rows, max_tokens=1000)
        times = engine.take_capture_times()
        assert [one.kind for one in times] == [PassKind.UPDATE, PassKind.LOSSES]
        assert all(0 <= one.compile_seconds < one.seconds and one.tokens % 64 == 0 for one in times)
        assert engine.take_capture_times() == ()


def test_a_job_that_is_not_finite_leaves_its_neighbours_bit_for_bit(tiny: Any) -> None:
    jobs = jobs_of(tiny)
    results: list[list[StepRecord]] = []
    states = []
    for damage in (False, True):
        with engine_of(tiny) as engine:
            for job in jobs:
                engine.admit(job, tiny.budget())
            if damage:
                block = engine._of(jobs[1].job_id).block
                block.params_rW.fill_(float("nan"))
                block.publish()
            for step in range(1, 4):
                engine.step({job.job_id: tiny.batch(job, step, tiny.rows(9)) for job in jobs})
            results.append([r for r in engine.take_records() if r.job_id != jobs[1].job_id])
            states.append([engine._of(job.job_id).block.params_rW.clone() for job in (jobs[0], jobs[2])])
            if damage:
                assert engine._of(jobs[1].job_id).block.exp_avg_rW.isfinite().all(), "no update was made"
    assert results[0] == results[1]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_job_that_rests_does_not_move(tiny: Any) -> None:
    jobs = jobs_of(tiny)
    with engine_of(tiny) as engine:
        curves(tiny, engine, jobs, steps=2)
        block = engine._of(jobs[1].job_id).block
        before = [t.clone() for t in (block.params_rW, block.exp_avg_rW, block.exp_avg_sq_rW)]
        engine.step({jobs[0].job_id: tiny.rows(1)})
        engine.take_records()
        after = (block.params_rW, block.exp_avg_rW, block.exp_avg_sq_rW)
        assert all(torch.equal(b, a) for b, a in zip(before, after, strict=True))


def test_resumed_equals_unbroken(tiny: Any, tmp_path: Path) -> None:
    job, rows = tiny.job(lora_rank=16, dropout=0.1, lr_schedule="linear"), tiny.rows(9)

    def train(engine: Engine, steps: range) -> list[float]:
        for step in steps:
            engine.step({job.job_id: tiny.batch(job, step, rows)})
        return [record.train_loss for record in engine.take_records()]

    with engine_of(tiny) as engine:
        engine.admit(job, tiny.budget())
        unbroken = train(engine, range(1, 7))
    with engine_of(tiny) as engine:
        engine.admit(job, tiny.budget())
        train(engine, range(1, 4))
        engine.save(job.job_id, tmp_path / "state")
    with engine_of(tiny) as engine:
        engine.restore(job, tiny.budget(), tmp_path / "state")
        assert train(engine, range(4, 7)) == pytest.approx(unbroken[3:], abs=1e-6)
    assert all(math.isfinite(loss) for loss in unbroken)
