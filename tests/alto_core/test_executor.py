"""The training loop: slots, backfill, boundaries, verdicts. A real engine over a tiny model."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from alto_core.checkpointing import Checkpointer
from alto_core.config import TuningTask
from alto_core.cuts import CutLog, Session
from alto_core.data.rows import TokenRow
from alto_core.domain import Boundary, JobState, LoraJob, Verdict
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.executor import Executor
from alto_core.job_run import JobRun
from alto_core.preparation import TaskPlan, plan_task


@pytest.fixture
def plan(tiny_task: Callable[..., TuningTask]) -> TaskPlan:
    space = {"learning_rate": [1e-3, 1e-2], "lora_rank": [2, 4], "adapter_batch_size": [2, 4]}
    return plan_task(tiny_task(search_space=space))


def runs_of(plan: TaskPlan, folder: Path, *, start: int = 0, until: float = 1.0) -> list[JobRun]:
    return [
        JobRun(
            job=job,
            budget=plan.budgets[job.job_id],
            folder=folder / job.job_id,
            start_step=start,
            target_step=plan.budgets[job.job_id].step_at(until),
        )
        for job in plan.jobs
    ]


def train(
    plan: TaskPlan,
    runs: Sequence[JobRun],
    *,
    num_slots: int = 8,
    verdicts: Callable[[Boundary], Sequence[Verdict | JobRun]] = lambda _: (),
    job_ids: Sequence[str] = (),
    **executor: Any,
) -> list[Boundary]:
    """Drive the executor to its end, in slots for these jobs, or for those of the runs."""
    fitting = [job for job in plan.jobs if job.job_id in job_ids] or [run.job for run in runs]
    ranks = sorted((job.lora_rank for job in fitting), reverse=True)
    boundaries = []
    modules = plan.jobs[0].target_modules
    backbone = load_backbone(plan.task.model, "cpu")
    with Engine(backbone, target_modules=modules, num_slots=num_slots, rank_rows=sum(ranks[:num_slots])) as engine:
        session = Executor(engine, plan.data, data_seed=0, **executor).run(runs)
        boundary = next(session, None)
        while boundary is not None:
            boundaries.append(boundary)
            try:
                boundary = session.send(verdicts(boundary))
            except StopIteration:
                break
    return boundaries


def curve(boundaries: Sequence[Boundary], job: LoraJob) -> dict[int, float]:
    """Train loss by step; a step that came twice would be lost, so steps are checked on the way."""
    records = [r for b in boundaries for r in b.steps if r.job_id == job.job_id]
    steps = [r.step for r in records]
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    return {r.step: r.train_loss for r in records}


def end(job_id: str, step: int) -> Verdict:
    return Verdict(job_id=job_id, state=JobState.OVERFITTING, step=step, reason="", evidence={})


def test_every_job_makes_each_of_its_steps_once_and_is_evaluated_when_due(plan: TaskPlan, tmp_path: Path) -> None:
    boundaries = train(plan, runs_of(plan, tmp_path))
    for job in plan.jobs:
        budget = plan.budgets[job.job_id]
        assert list(curve(boundaries, job)) == list(range(1, budget.total_steps + 1))
        evaluated = [e.step for b in boundaries for e in b.evaluations if e.job_id == job.job_id]
        assert evaluated == list(budget.eval_steps)
        assert (tmp_path / job.job_id / "adapter" / "adapter_model.safetensors").is_file()


def test_few_slots_give_the_same_curves_as_many(plan: TaskPlan, tmp_path: Path) -> None:
    together = train(plan, runs_of(plan, tmp_path / "a"))
    in_turn = train(plan, runs_of(plan, tmp_path / "b"), num_slots=3)
    assert max(len(b.running) for b in in_turn) == 3
    for job in plan.jobs:
        assert curve(in_turn, job) == pytest.approx(curve(together, job), abs=1e-5)


def test_a_freed_slot_goes_to_a_job_of_the_same_batch_size(plan: TaskPlan, tmp_path: Path) -> None:
    first: list[str] = []

    def end_the_first(boundary: Boundary) -> list[Verdict]:
        if first:
            return []
        first.append(boundary.running[0])
        return [end(first[0], 1)]

    boundaries = train(plan, runs_of(plan, tmp_path), num_slots=2, verdicts=end_the_first)
    batch_size = {job.job_id: job.adapter_batch_size for job in plan.jobs}
    before, after = set(boundaries[0].running), set(boundaries[1].running)
    (joined,) = after - before
    assert batch_size[joined] == batch_size[first[0]]
    assert len(after) == 2


def test_a_verdict_ends_its_job_and_touches_no_other(plan: TaskPlan, tmp_path: Path) -> None:
    ended = plan.jobs[0]
    whole = train(plan, runs_of(plan, tmp_path / "a"))
    cut = train(
        plan,
        runs_of(plan, tmp_path / "b"),
        verdicts=lambda b: [end(ended.job_id, 2)] if any(e == (ended.job_id, 2) for e in evaluated(b)) else [],
    )
    assert list(curve(cut, ended)) == [1, 2]
    for job in plan.jobs[1:]:
        assert curve(cut, job) == pytest.approx(curve(whole, job), abs=1e-5)


def evaluated(boundary: Boundary) -> list[tuple[str, int]]:
    return [(e.job_id, e.step) for e in boundary.evaluations]


def test_two_stretches_equal_one(plan: TaskPlan, tmp_path: Path) -> None:
    whole = train(plan, runs_of(plan, tmp_path / "a"))
    warmup = train(plan, runs_of(plan, tmp_path / "b", until=0.2))
    rest = train(plan, [dataclasses.replace(r, start_step=4) for r in runs_of(plan, tmp_path / "b")])
    for job in plan.jobs:
        assert curve(warmup, job) | curve(rest, job) == curve(whole, job)
    for job in plan.jobs:
        name = Path(job.job_id) / "adapter" / "adapter_model.safetensors"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def rows_taught(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, tuple[int, ...]]]:
    """Row ids of every joint step by job, as the engine gets them."""
    taught: list[dict[str, tuple[int, ...]]] = []
    step = Engine.step

    def note(self: Engine, rows_by_job: Mapping[str, Sequence[TokenRow]]) -> None:
        taught.append({job_id: tuple(row.row_id for row in rows) for job_id, rows in rows_by_job.items()})
        step(self, rows_by_job)

    monkeypatch.setattr(Engine, "step", note)
    return taught


@pytest.mark.parametrize("at", [2, 5, 9])
def test_a_run_from_a_cut_trains_the_same_rows_to_the_same_bits(
    plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """K2: rows, curves, company and adapters are those of the unbroken run, though jobs came and went."""
    taught = rows_taught(monkeypatch)
    ended = plan.jobs[-1].job_id

    def verdicts(boundary: Boundary) -> list[Verdict]:
        return [end(ended, 3)] if (ended, 3) in evaluated(boundary) else []

    whole = train(plan, runs_of(plan, tmp_path / "a"), num_slots=2, verdicts=verdicts)
    unbroken, taught[:] = list(taught), []
    session = Session(until=1.0, job_ids=tuple(job.job_id for job in plan.jobs))

    def killed(boundary: Boundary) -> list[Verdict]:
        killed.boundaries += 1  # type: ignore[attr-defined]
        if killed.boundaries > at:  # type: ignore[attr-defined]
            raise InterruptedError
        return verdicts(boundary)

    killed.boundaries = 0  # type: ignore[attr-defined]
    log = CutLog(tmp_path / "cuts")
    checkpoints = Checkpointer(log, interval_seconds=0)
    with pytest.raises(InterruptedError):
        train(
            plan,
            runs_of(plan, tmp_path / "b"),
            num_slots=2,
            verdicts=killed,
            checkpoints=checkpoints,
            session=session,
        )
    cut, _ = log.newest_whole(lambda job_id: tmp_path / "b" / job_id / "state")
    assert cut is not None
    taught.clear()
    by_id = {run.job.job_id: run for run in runs_of(plan, tmp_path / "b")}
    going_on = [
        dataclasses.replace(by_id[place.job_id], start_step=place.step, rank_start=place.rank_start)
        for place in cut.places
    ]
    rest = train(plan, going_on, num_slots=2, verdicts=verdicts, job_ids=list(by_id))
    assert 0 < len(taught) < len(unbroken)
    assert taught == unbroken[-len(taught) :], "the same rows of the same jobs side by side"
    curves = {(r.job_id, r.step): r for boundary in whole for r in boundary.steps}
    assert all(curves[r.job_id, r.step] == r for boundary in rest for r in boundary.steps)
    for job in plan.jobs:
        name = Path(job.job_id) / "adapter" / "adapter_model.safetensors"
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_job_that_becomes_non_finite_is_shown_at_the_boundary_and_harms_nobody(
    tiny_task: Callable[..., TuningTask], tmp_path: Path
) -> None:
    space = {"learning_rate": [1e-3, 1e30], "lora_rank": 2, "adapter_batch_size": 4, "max_grad_norm": 0}
    plan = plan_task(tiny_task(search_space=space, budget={"steps": 20, "eval_interval_fraction": 1.0}))
    sound, wild = plan.jobs
    alone = train(plan, [run for run in runs_of(plan, tmp_path / "a") if run.job == sound])
    both = train(plan, runs_of(plan, tmp_path / "b"))
    assert curve(both, sound) == pytest.approx(curve(alone, sound), abs=1e-5)
    finite = [math.isfinite(loss) for loss in curve(both, wild).values()]
    assert not all(finite), "the wild job is meant to become non-finite"
    assert len(both) == len(alone), "nobody waits for the device between evaluations"
    assert len(curve(both, wild)) == 20, "every step is shown"


def test_a_job_that_cannot_be_admitted_fails_alone(plan: TaskPlan, tmp_path: Path) -> None:
    train(plan, [run for run in runs_of(plan, tmp_path / "start") if run.job.lora_rank == 4][:1])
    (adapter,) = (tmp_path / "start").glob("*/adapter")
    runs = [dataclasses.replace(run, init_adapter=adapter) for run in runs_of(plan, tmp_path / "b")]
    boundaries = train(plan, runs)
    failed = {failure.job_id: failure.reason for b in boundaries for failure in b.failures}
    assert set(failed) == {job.job_id for job in plan.jobs if job.lora_rank == 2}
    assert all("r=4, expected 2" in reason for reason in failed.values())
    for job in plan.jobs:
        if job.lora_rank == 4:
            assert len(curve(boundaries, job)) == plan.budgets[job.job_id].total_steps


def test_five_jobs_ready_at_once_never_share_four_slots(plan: TaskPlan, tmp_path: Path) -> None:
    """At one boundary a verdict frees a slot for which several wait, and a stretch that is sent in asks for one too."""
    runs = runs_of(plan, tmp_path)
    back = runs.pop()
    sent: list[JobRun] = []

    def end_one_and_send_one(boundary: Boundary) -> Sequence[Verdict | JobRun]:
        if sent:
            return []
        sent.append(back)
        return [end(boundary.running[0], 1), back]

    boundaries = train(plan, runs, num_slots=4, verdicts=end_one_and_send_one)
    assert [len(b.running) for b in boundaries[:2]] == [4, 4], "the freed slot is filled, and no fifth one made"
    assert max(len(b.running) for b in boundaries) == 4
    last = {record.job_id: record.step for b in boundaries for record in b.steps}
    assert sorted(last.values()) == [1] + [20] * 7, "who waited had its turn"


def test_memory_is_flat_over_twenty_jobs_in_one_slot(
    tiny_task: Callable[..., TuningTask], living_tensor_bytes: Callable[[], int], tmp_path: Path
) -> None:
    space = {"learning_rate": [i * 1e-4 for i in range(1, 21)], "lora_rank": 2, "adapter_batch_size": 2}
    plan = plan_task(tiny_task(search_space=space, budget={"steps": 2, "eval_interval_fraction": 1.0}))
    seen: set[str] = set()
    levels: dict[int, int] = {}

    def look(boundary: Boundary) -> Sequence[Verdict]:
        seen.update(boundary.running)
        if len(seen) in (5, 20):
            gc.collect()
            levels[len(seen)] = living_tensor_bytes()
        return []

    train(plan, runs_of(plan, tmp_path), num_slots=1, verdicts=look)
    assert len(seen) == 20
    adapter = (tmp_path / plan.jobs[0].job_id / "adapter" / "adapter_model.safetensors").stat().st_size
    assert levels[20] - levels[5] < adapter, "fifteen jobs leave less than one adapter behind"
