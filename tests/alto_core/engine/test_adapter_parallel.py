"""One backbone over several ranks: every job is trained, judged and kept as it would be on one device."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from alto_core.checkpointing import Checkpointer
from alto_core.config import ModelSection, TuningTask
from alto_core.cuts import Cut, CutLog, Session
from alto_core.domain import Boundary, JobState, Verdict
from alto_core.engine.adapter_parallel import AnyEngine, ParallelEngine
from alto_core.engine.backbone import load_backbone, release_backbone
from alto_core.engine.engine import UNTUNED, Engine
from alto_core.engine.messages import Call
from alto_core.engine.ranks import RankGroup
from alto_core.errors import EngineError, ModelError
from alto_core.executor import Executor
from alto_core.job_run import JobRun
from alto_core.preparation import TaskPlan, plan_task
from tests.alto_core.engine.rank_faults import break_passes, refuse_large_passes

pytestmark = pytest.mark.xdist_group("ranks")
TOLERANCE = 1e-5
"""Nats; a rank packs other jobs together than one device does, which changes the order of sums in float32."""


@pytest.fixture(scope="module")
def four(tiny_model: Path) -> Iterator[RankGroup]:
    """Four ranks, each with a quarter of every layer."""
    ranks = RankGroup(ModelSection(name=str(tiny_model)), ["cpu"] * 4, sharded=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def two(tiny_model: Path) -> Iterator[RankGroup]:
    ranks = RankGroup(ModelSection(name=str(tiny_model)), ["cpu"] * 2, sharded=True)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def plan(tiny_task: Callable[..., TuningTask]) -> Iterator[TaskPlan]:
    """Six jobs of two batch sizes, so that four ranks have different numbers of jobs and of passes."""
    space = {
        "learning_rate": [1e-3, 1e-2, 3e-2],
        "lora_rank": 2,
        "adapter_batch_size": [2, 4],
        "gradient_accumulation": 2,
        "dropout": 0.1,
    }
    budget = {"steps": 4, "eval_interval_fraction": 0.5}
    yield plan_task(tiny_task(search_space=space, budget=budget))
    release_backbone()


def runs_of(plan: TaskPlan, folder: Path) -> list[JobRun]:
    return [
        JobRun(job=job, budget=plan.budgets[job.job_id], folder=folder / job.job_id, start_step=0, target_step=4)
        for job in plan.jobs
    ]


def sizes(plan: TaskPlan, num_slots: int) -> dict[str, object]:
    modules = sorted({name for job in plan.jobs for name in job.target_modules})
    return {"target_modules": modules, "num_slots": num_slots, "max_lora_rank": 2}


def drive(
    engine: AnyEngine,
    plan: TaskPlan,
    runs: Sequence[JobRun],
    *,
    verdicts: Callable[[Boundary], Sequence[Verdict]] = lambda _: (),
    checkpoints: Checkpointer | None = None,
    session: Session | None = None,
) -> list[Boundary]:
    training = Executor(engine, plan.data, data_seed=0, checkpoints=checkpoints, session=session).run(runs)
    boundaries = []
    boundary = next(training, None)
    while boundary is not None:
        boundaries.append(boundary)
        try:
            boundary = training.send(verdicts(boundary))
        except StopIteration:
            break
    return boundaries


def curves(boundaries: Sequence[Boundary]) -> dict[tuple[str, str, int], float]:
    found = {}
    for boundary in boundaries:
        assert not boundary.failures
        for record in boundary.steps:
            assert ("train", record.job_id, record.step) not in found, "a step was made twice"
            found["train", record.job_id, record.step] = record.train_loss
            found["norm", record.job_id, record.step] = record.grad_norm
        for evaluation in boundary.evaluations:
            found["val", evaluation.job_id, evaluation.step] = evaluation.val_loss
    return found


@pytest.fixture(scope="module")
def alone(plan: TaskPlan, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], float]:
    """What one device gives."""
    backbone = load_backbone(plan.task.model, "cpu")
    with Engine(backbone, rank_rows=12, **sizes(plan, 6)) as engine:  # type: ignore[arg-type]
        return curves(drive(engine, plan, runs_of(plan, tmp_path_factory.mktemp("alone"))))


def parallel(ranks: RankGroup, plan: TaskPlan, num_slots: int = 8, **options: object) -> ParallelEngine:
    per_rank = -(-num_slots // len(ranks))
    return ParallelEngine(ranks, rank_rows=2 * per_rank, **sizes(plan, num_slots), **options)  # type: ignore[arg-type]


def test_every_curve_is_the_one_of_a_single_device(
    four: RankGroup, two: RankGroup, plan: TaskPlan, alone: dict[tuple[str, str, int], float], tmp_path: Path
) -> None:
    for ranks, recomputed in ((four, "none"), (two, "layers")):
        with parallel(ranks, plan, recomputed=recomputed) as engine:
            boundaries = drive(engine, plan, runs_of(plan, tmp_path / str(len(ranks))))
        assert curves(boundaries) == pytest.approx(alone, abs=TOLERANCE)
        assert all((tmp_path / str(len(ranks)) / job.job_id / "adapter").is_dir() for job in plan.jobs)


def test_each_rank_has_as_much_to_do_and_a_freed_place_is_filled_on_its_rank(
    two: RankGroup, plan: TaskPlan, alone: dict[tuple[str, str, int], float], tmp_path: Path
) -> None:
    ended: list[str] = []
    seen: list[dict[str, int]] = []
    batch_size = {job.job_id: job.adapter_batch_size for job in plan.jobs}

    with parallel(two, plan, num_slots=4) as engine:

        def end_one(boundary: Boundary) -> list[Verdict]:
            seen.append({job_id: engine.rank_start(job_id) // 4 for job_id in boundary.running})
            if ended or not boundary.evaluations:
                return []
            ended.append(boundary.running[0])
            return [Verdict(job_id=ended[0], state=JobState.OVERFITTING, step=1, reason="", evidence={})]

        boundaries = drive(engine, plan, runs_of(plan, tmp_path), verdicts=end_one)
    before, after = seen[:2]
    loads = [sum(batch_size[job_id] for job_id, on in before.items() if on == rank) for rank in (0, 1)]
    assert sorted(map(batch_size.__getitem__, before)) == [2, 4, 4, 4]
    assert abs(loads[0] - loads[1]) == 2
    (joined,) = after.keys() - before.keys()
    assert after[joined] == before[ended[0]]
    assert {job_id: rank for job_id, rank in after.items() if job_id != joined} == {
        job_id: rank for job_id, rank in before.items() if job_id != ended[0]
    }
    kept = {
        key: value for key, value in alone.items() if key[1] != ended[0] or key[2] <= boundaries[0].evaluations[0].step
    }
    assert curves(boundaries) == pytest.approx(kept, abs=TOLERANCE)


def test_ranks_without_jobs_take_part_and_evaluation_and_answers_are_those_of_one_device(
    four: RankGroup, plan: TaskPlan, tmp_path: Path
) -> None:
    job, rows = plan.jobs[0], plan.data.validation.rows
    prompts = [(who, tuple(row.token_ids[:4])) for row in rows[:3] for who in (job.job_id, None)]
    found = []

    def single() -> Engine:
        return Engine(load_backbone(plan.task.model, "cpu"), rank_rows=2, **sizes(plan, 1))  # type: ignore[arg-type]

    for make in (lambda: parallel(four, plan, 4), single):
        with make() as engine:
            engine.admit(job, plan.budgets[job.job_id])
            for step in range(3):
                engine.step({job.job_id: plan.data.train.rows[4 * step : 4 * step + 4]})
            engine.take_records()
            losses = engine.evaluate([job.job_id, UNTUNED], rows, max_tokens=40)
            sides = engine.side_losses(job.job_id, rows, max_tokens=10**6)
            answers = engine.generate(prompts, max_new_tokens=5, stop_token_ids=[2])
            found.append((losses, sides, answers))
    (ours, our_sides, our_answers), (theirs, their_sides, their_answers) = found
    for who in (job.job_id, UNTUNED):
        assert ours[who].loss_sums == pytest.approx(theirs[who].loss_sums, abs=1e-4)
    assert our_sides == pytest.approx(their_sides, abs=1e-4)
    assert our_answers == their_answers


def test_training_that_was_cut_short_goes_on_on_fewer_ranks(
    four: RankGroup, two: RankGroup, plan: TaskPlan, alone: dict[tuple[str, str, int], float], tmp_path: Path
) -> None:
    session = Session(until=1.0, job_ids=tuple(job.job_id for job in plan.jobs))
    log = CutLog(tmp_path / "cuts")
    with parallel(four, plan) as engine:
        checkpoints = Checkpointer(log, interval_seconds=0)
        training = Executor(engine, plan.data, data_seed=0, checkpoints=checkpoints, session=session).run(
            runs_of(plan, tmp_path)
        )
        boundaries = [next(training)]
        boundaries.append(training.send(()))  # the cut of the first boundary is on its way
        checkpoints.finish()
        training.close()
    cut = log.newest_readable()
    assert cut is not None and {place.step for place in cut.places} == {1}
    begun = [_continued(run, cut) for run in runs_of(plan, tmp_path)]
    with parallel(two, plan, num_slots=4) as engine:  # two of the six have to wait for a place
        rest = drive(engine, plan, begun, checkpoints=Checkpointer(log, begun=cut), session=session)
    assert max(len(boundary.running) for boundary in rest) == 4
    assert curves([boundaries[0], *rest]) == pytest.approx(alone, abs=TOLERANCE)


def _continued(run: JobRun, cut: Cut) -> JobRun:
    (place,) = (place for place in cut.places if place.job_id == run.job.job_id)
    return JobRun(
        job=run.job,
        budget=run.budget,
        folder=run.folder,
        start_step=place.step,
        target_step=run.target_step,
        rank_start=place.rank_start,
    )


def test_whole_backbones_need_no_common_passes(
    tiny_model: Path, plan: TaskPlan, alone: dict[tuple[str, str, int], float], tmp_path: Path
) -> None:
    ranks = RankGroup(ModelSection(name=str(tiny_model)), ["cpu"] * 2, sharded=False)
    try:
        with parallel(ranks, plan) as engine:
            assert curves(drive(engine, plan, runs_of(plan, tmp_path))) == pytest.approx(alone, abs=TOLERANCE)
            job = plan.jobs[0]
            engine.admit(job, plan.budgets[job.job_id])
            with pytest.raises(EngineError, match="holds a slot already"):
                engine.admit(job, plan.budgets[job.job_id])
            with pytest.raises(EngineError, match=r"rank 0 of 2 \(cpu\) failed: ValueError: .*trained tokens"):
                engine.step({job.job_id: []})
            engine.step({job.job_id: plan.data.train.rows[:4]})  # the rank is as it was
            (record,) = engine.take_records()
            assert record.step == 1 and math.isfinite(record.train_loss)
    finally:
        ranks.close()
    assert not ranks.is_open


def test_a_step_that_ran_out_of_memory_on_one_rank_is_made_once_on_each(
    tiny_model: Path, plan: TaskPlan, alone: dict[tuple[str, str, int], float], tmp_path: Path
) -> None:
    ranks = RankGroup(ModelSection(name=str(tiny_model)), ["cpu"] * 2, sharded=False)
    try:
        ranks.call({1: Call(name="", function=refuse_large_passes)})
        with parallel(ranks, plan) as engine:
            boundaries = drive(engine, plan, runs_of(plan, tmp_path))
        assert engine.max_pass_tokens < 1024
    finally:
        ranks.close()
    assert [note.text for boundary in boundaries for note in boundary.shortages]
    assert curves(boundaries) == pytest.approx(alone, abs=TOLERANCE)


def test_a_lost_rank_ends_the_others_and_is_named(four: RankGroup, plan: TaskPlan, tmp_path: Path) -> None:
    """The last test with these ranks."""
    process_ids = four.process_ids
    with parallel(four, plan) as engine:
        training = Executor(engine, plan.data, data_seed=0).run(runs_of(plan, tmp_path))
        next(training)
        os.kill(process_ids[2], signal.SIGKILL)
        with pytest.raises(EngineError, match=r"rank 2 of 4 \(cpu\) was lost: ended by SIGKILL.*can be resumed"):
            training.send(())
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    with pytest.raises(EngineError, match="the ranks have ended"):
        four.call({})


def test_a_pass_that_broke_on_one_rank_ends_all_and_is_told_with_its_cause(
    two: RankGroup, plan: TaskPlan, tmp_path: Path
) -> None:
    """The last test with these ranks."""
    two.call({1: Call(name="", function=break_passes)})
    expected = r"rank 1 of 2 \(cpu\) failed: RuntimeError: made up"
    with parallel(two, plan) as engine, pytest.raises(EngineError, match=expected):
        drive(engine, plan, runs_of(plan, tmp_path))
    assert not two.is_open


def test_a_model_that_cannot_be_loaded_is_told_as_always(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        RankGroup(ModelSection(name=str(tmp_path / "nowhere")), ["cpu"], sharded=True)
