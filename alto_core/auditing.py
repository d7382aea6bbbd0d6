"""Was early exit right? A random sample of the jobs that a task ended early is run to the end, and held against it.

The audit leaves the task as it is: parked states are copied, curves go to a file among the task's artifacts, and no
job's state or record changes. So it can run in spare capacity at any time after the task, and again.
"""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alto_core.curve_files import CurveRows, write_recording
from alto_core.domain import JobState
from alto_core.early_exit.audit import WARMUP_FRACTIONS, RankAgreement, best_difference, rank_agreement
from alto_core.early_exit.curves import Curve
from alto_core.errors import StoreError
from alto_core.evaluation.intervals import wilson_interval
from alto_core.executor import Executor
from alto_core.job_run import JobRun
from alto_core.outcomes import Interval, Score
from alto_core.parking import ParkedJob, parked_jobs
from alto_core.recording import CurveRecorder, record_training
from alto_core.reviving import at_work_on
from alto_core.selection import score_jobs
from alto_core.store import EventDraft
from alto_core.strict_json import strict_json
from alto_core.task_engine import open_engine
from alto_core.workspace import Workspace

KNOWN_TO_THEIR_END = (JobState.FINISHED, JobState.OVERFITTING)
"""Ends of jobs whose lowest validation loss is taken as what their whole budget would have given."""

CURVES_ARTIFACT, REPORT_ARTIFACT = "audit/curves.parquet", "audit/report.json"


@dataclass(frozen=True, kw_only=True)
class AuditedJob:
    """One sampled job at the end of its budget."""

    job_id: str
    exit_state: JobState
    exit_step: int
    exit_val_loss: float | None
    """Lowest before its exit."""
    final_val_loss: float | None
    """Lowest over the whole budget."""
    beats_winner: bool
    """Its lowest loss is below the winner's by more than the paired standard error."""
    metric_value: float | None
    """Downstream score of its best adapter on the validation rows."""


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What early exit cost a task, as far as the sample tells."""

    task_id: str
    share: float
    num_exited: int
    """Jobs that ended early."""
    num_without_state: int
    """Of them those of which only the adapter was kept; they cannot be sampled."""
    jobs: tuple[AuditedJob, ...]
    winner: str
    winner_val_loss: float
    winner_metric: float | None
    regret: float
    """Winner's lowest validation loss minus that of winner and sample together, nats per token; 0: nothing missed."""
    regret_standard_error: float | None
    metric_regret: float | None
    """Highest downstream score of winner and sample minus the winner's; None without a metric."""
    false_exits: Interval | None
    """Share of the sampled jobs that beat the winner, with its 95 % interval; None for an empty sample."""
    agreement: tuple[RankAgreement, ...]
    """Early ranking against the end, over finished and audited jobs."""

    def as_json(self) -> str:
        return strict_json(dataclasses.asdict(self), indent=1)


def audit(workspace: Workspace, *, share: float, seed: int) -> AuditReport:
    """Run a random sample of a task's exited jobs to the end.

    Args:
        workspace: a task that has ended with a winner.
        share: of the exited jobs whose state was kept, in (0, 1]; rounded up.
        seed: draws the sample.

    Raises:
        StoreError: the task has not ended, has no winner, or another process is at work on it.
    """
    with at_work_on(workspace):
        winner = workspace.result.winner
        if winner is None:
            raise StoreError(f"task {workspace.task_id}: got a task without a winner, expected one to compare with")
        exited = tuple(job for job in parked_jobs(workspace) if job.job_id != winner)
        sample = draw_sample(exited, share, seed)
        with tempfile.TemporaryDirectory(dir=workspace.folder) as temporary, workspace.tracked() as runs:
            curves = runs.read_curves()
            recorder = _train(workspace, sample, curves, Path(temporary))
            final = {job.job_id: recorder.curve(job.job_id) for job in sample}
            folders = {job.job_id: Path(temporary) / job.job_id for job in sample}
            scores = _scores(workspace, folders)
            report = make_report(
                workspace, sample=sample, exited=exited, curves=curves, final=final, scores=scores, share=share
            )
            runs.log_text(report.as_json(), REPORT_ARTIFACT)
            if final:
                file = Path(temporary) / Path(CURVES_ARTIFACT).name
                write_recording(file, [_rows(workspace, curve) for curve in final.values()])
                for written in sorted(Path(temporary).glob("*.parquet")):
                    runs.log_artifact(written, Path(CURVES_ARTIFACT).parent.as_posix())
        workspace.store.append_events(workspace.task_id, [EventDraft(kind="audit", text=summary_line(report))])
        return report


def draw_sample(exited: Sequence[ParkedJob], share: float, seed: int) -> tuple[ParkedJob, ...]:
    """`ceil(share * n)` of the n exited jobs that can go on and have budget left, at random."""
    able = sorted(
        (job for job in exited if job.can_go_on and job.record.step < job.record.total_steps), key=lambda j: j.job_id
    )
    return tuple(random.Random(seed).sample(able, math.ceil(share * len(able) - 1e-9)))  # noqa: S311 - no secret


def summary_line(report: AuditReport) -> str:
    """The audit in one sentence."""
    if report.false_exits is None:
        return "no job that ended early could be run on"
    return (
        f"{len(report.jobs)} of {report.num_exited} exited jobs run to the end: false exits {report.false_exits}, "
        f"regret {report.regret:.4f} nats per token"
    )


def make_report(
    workspace: Workspace,
    *,
    sample: Sequence[ParkedJob],
    exited: Sequence[ParkedJob],
    curves: Mapping[str, Curve],
    final: Mapping[str, Curve],
    scores: Mapping[str, Score],
    share: float,
) -> AuditReport:
    """Hold the sampled jobs, run to their end, against the winner."""
    winner = workspace.result.winner
    assert winner is not None
    best = curves[winner]
    winner_score = workspace.result.score(winner, "validation")
    winner_metric = winner_score.metric_value.value if winner_score and winner_score.metric_value else None
    jobs = tuple(_audited(job, final[job.job_id], best, scores.get(job.job_id)) for job in sample)
    lowest = min(
        (curve for curve in (best, *final.values()) if curve.best_val is not None), key=lambda c: c.best_val or 0.0
    )
    pair = best_difference(best, lowest)
    metrics = [job.metric_value for job in jobs if job.metric_value is not None]
    records = workspace.records().values()
    known = [curves[record.job_id] for record in records if record.state in KNOWN_TO_THEIR_END]
    ended = {curve.job_id: curve for curve in known} | dict(final)
    assert best.best_val is not None
    return AuditReport(
        task_id=workspace.task_id,
        share=share,
        num_exited=len(exited),
        num_without_state=sum(not job.can_go_on for job in exited),
        jobs=jobs,
        winner=winner,
        winner_val_loss=best.best_val,
        winner_metric=winner_metric,
        regret=pair.difference,
        regret_standard_error=pair.standard_error if math.isfinite(pair.standard_error) else None,
        metric_regret=max([winner_metric, *metrics]) - winner_metric if winner_metric is not None else None,
        false_exits=wilson_interval(sum(job.beats_winner for job in jobs), len(jobs)) if jobs else None,
        agreement=tuple(rank_agreement(list(ended.values()), fraction) for fraction in WARMUP_FRACTIONS),
    )


def _audited(job: ParkedJob, curve: Curve, winner: Curve, score: Score | None) -> AuditedJob:
    pair = best_difference(curve, winner) if curve.best_val is not None else None
    return AuditedJob(
        job_id=job.job_id,
        exit_state=job.record.state,
        exit_step=job.record.step,
        exit_val_loss=job.record.best_val_loss,
        final_val_loss=curve.best_val,
        beats_winner=pair is not None and pair.difference < -pair.noise,
        metric_value=score.metric_value.value if score and score.metric_value else None,
    )


def _train(
    workspace: Workspace, sample: Sequence[ParkedJob], curves: Mapping[str, Curve], folder: Path
) -> CurveRecorder:
    """Train copies of the parked states to the end; only a loss that is no number ends one."""
    job_ids = [job.job_id for job in sample]
    begun = {job.job_id: curves[job.job_id].through(job.record.step) for job in sample}
    recorder = CurveRecorder([workspace.jobs[job_id] for job_id in job_ids], workspace.budgets, begun)
    if not sample:
        return recorder
    stretches: list[JobRun] = []
    for stretch in workspace.stretches(job_ids, until=1.0):
        own = folder / stretch.job.job_id
        shutil.copytree(stretch.folder / "state", own / "state")
        stretches.append(dataclasses.replace(stretch, folder=own))
    with open_engine(workspace, job_ids, num_slots=_slots(workspace, len(job_ids))) as engine:
        executor = Executor(engine, workspace.data, data_seed=workspace.task.data.seed)
        record_training(executor, stretches, recorder)
    return recorder


def _scores(workspace: Workspace, folders: Mapping[str, Path]) -> dict[str, Score]:
    there = {job_id: folder for job_id, folder in folders.items() if (folder / "adapter").is_dir()}
    slots = _slots(workspace, len(there))
    scores = score_jobs(workspace, workspace.data.validation, list(there), num_slots=slots, folders=there)
    return {score.job_id: score for score in scores if score.job_id is not None}


def _slots(workspace: Workspace, num_jobs: int) -> int:
    """As many as the task had, for so many jobs."""
    profile = workspace.store.profile(workspace.task_id)
    return max(1, min(num_jobs, profile.num_slots if profile else 1))


def _rows(workspace: Workspace, curve: Curve) -> CurveRows:
    job = workspace.jobs[curve.job_id]
    return CurveRows(curve=curve, lora_rank=job.lora_rank, adapter_batch_size=job.rows_per_update)
