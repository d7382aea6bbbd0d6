"""The MLflow runs of one tuning task: a parent for the task and a child per job.

What is logged is written into the task's spool at once and delivered by the side thread of `sender`; what is read is
put together in `series`. Opening and finding the runs is `client`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from alto_core.domain import CurveSource, Evaluation, JobState, StepRecord, TaskState
from alto_core.early_exit.curves import Curve
from alto_core.errors import TrackingError
from alto_core.outcomes import JobOutcome, Score
from alto_core.tracking import adapters
from alto_core.tracking.connection import Connection, timed
from alto_core.tracking.description import (
    GATE_RANK,
    JOB_ID,
    REASON,
    STATE,
    TASK_ID,
    TrackedJob,
    as_tags,
    job_metrics,
    score_metrics,
)
from alto_core.tracking.history import HistoryReader
from alto_core.tracking.messages import Status, Tags
from alto_core.tracking.names import clean_name
from alto_core.tracking.outbox import Outbox
from alto_core.tracking.packaging import ServingFacts
from alto_core.tracking.registry import RegisteredAdapter, Registry
from alto_core.tracking.rows import FOLDER as ROWS_FOLDER
from alto_core.tracking.rows import RowLossArchive
from alto_core.tracking.spool import Spool
from alto_core.tracking.task_curves import TaskCurves

SPOOL_FOLDER = "tracking"
"""In the task's folder."""
VERDICT_WAIT_SECONDS = 5.0
"""How long the end of a job waits for its curve to be in MLflow."""
GATE_WAIT_SECONDS = 30.0
"""How long a gate waits for all curves to be there."""

_RUN_STATUS = {JobState.FINISHED: "FINISHED", JobState.FAILED: "FAILED"}
_TASK_STATUS = {TaskState.FINISHED: "FINISHED", TaskState.FAILED: "FAILED", TaskState.CANCELLED: "KILLED"}


class TaskRuns:
    """Logs and reads one task. Logging waits for nothing; `flush` waits for MLflow and tells what went wrong.

    Safe to use from several threads. One process at a time logs a task; any number may read it.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        task_id: str,
        experiment_id: str,
        parent_run_id: str,
        jobs: Sequence[TrackedJob],
        ema_alpha: float,
        task_folder: Path,
    ):
        self.task_id = task_id
        self.experiment_id = experiment_id
        self.parent_run_id = parent_run_id
        self._connection = connection
        self._lock = threading.Lock()
        spool = Spool(task_folder / SPOOL_FOLDER)
        is_patient = spool.end == 0  # else the spool has what an absent MLflow does not give
        self._jobs = {job.job_id: job for job in jobs}
        self._rows = RowLossArchive(connection, parent_run_id, spool.folder / ROWS_FOLDER, is_patient=is_patient)
        self._curves = TaskCurves(spool, HistoryReader(connection, is_patient=is_patient), self._rows)
        self._outbox = Outbox(connection, spool, task_folder, curves=self._curves, ema_alpha=ema_alpha)

    @property
    def job_run_ids(self) -> Mapping[str, str]:
        """MLflow run ids by job id, in the order of the search space."""
        return MappingProxyType({job_id: job.run_id for job_id, job in self._jobs.items()})

    @property
    def seconds_spent(self) -> float:
        """Wall time that callers of this tracker were held up so far."""
        return self._connection.callers.seconds

    @property
    def seconds_in_background(self) -> float:
        """Wall time that side threads of this tracker worked so far; it overlaps with training."""
        return self._connection.background.seconds

    @timed
    def log_steps(self, records: Sequence[StepRecord]) -> None:
        """Log optimizer steps, those of a job one after the other. A job may go back to an earlier step after a resume.

        Raises:
            TrackingError: only where a job does not go on where it stood, and its first steps are not in the spool:
                its history is read from MLflow.
        """
        by_run: dict[str, list[StepRecord]] = {}
        for record in records:
            by_run.setdefault(self._job(record.job_id).run_id, []).append(record)
        self._outbox.put_steps(by_run)

    @timed
    def log_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Log the evaluations of one boundary: validation losses, and what sums up the steps so far.

        All row losses are one artifact of the parent.
        """
        pairs = [(self._job(evaluation.job_id).run_id, evaluation) for evaluation in evaluations]
        fresh = [evaluation for run_id, evaluation in pairs if self._curves.note_evaluation(run_id, evaluation)]
        self._outbox.put_evaluations(pairs)
        with self._lock:
            file = self._rows.write(fresh, self._outbox.now()) if fresh else None
        if file:
            self._outbox.put_file(self.parent_run_id, file, ROWS_FOLDER)

    @timed
    def flush(self, seconds: float | None = None) -> None:
        """Return when MLflow has everything that was logged.

        Args:
            seconds: how long an MLflow is waited for that takes nothing; None: as long as any call.

        Raises:
            TrackingError: MLflow refused something, which is passed over and told once.
            UnreachableError: MLflow stayed away; what waits is in the spool, and the next flush tries again.
        """
        self._outbox.flush(seconds)

    @timed
    def read_curves(self, job_ids: Sequence[str] | None = None) -> dict[str, Curve]:
        """The curves as they stand, row losses included: what MLflow holds, and what is on its way there.

        A process that logs these jobs reads from MLflow once and is kept up to date by its side thread; any other reads
        what came since its last call.

        Args:
            job_ids: None for all jobs.

        Raises:
            TrackingError: MLflow cannot be reached and nothing is in the spool, or the task has no such job.
        """
        jobs = [self._job(job_id) for job_id in (self._jobs if job_ids is None else job_ids)]
        return self._curves.read(jobs, is_away=self._outbox.is_away)

    @timed
    def settled_curves(self, job_ids: Sequence[str], seconds: float | None = None) -> dict[str, Curve]:
        """The curves to decide upon: these jobs' points go to MLflow now, and what it gives back is what counts.

        Where MLflow is away or slow the spooled points count, which are the same numbers; see `curve_source`.

        Args:
            job_ids: the jobs.
            seconds: how long MLflow is waited for; None: as long as a verdict does.
        """
        run_ids = [self._job(job_id).run_id for job_id in job_ids]
        self._outbox.hurry(run_ids, VERDICT_WAIT_SECONDS if seconds is None else seconds)
        return self.read_curves(job_ids)

    def curve_source(self, job_id: str) -> CurveSource:
        """Where the curve of a job that was read last comes from."""
        return self._curves.source(self._job(job_id).run_id)

    @timed
    def set_job_state(
        self,
        job_id: str,
        state: JobState,
        *,
        reason: str = "",
        gate_rank: int | None = None,
        extra_tags: Mapping[str, str] | None = None,
    ) -> None:
        """Tag the job's run with its state; end the run with an end state, open it again with any other."""
        before = self._job(job_id)
        tags = {STATE: state.value}
        if reason or before.state.is_end:
            tags[REASON] = reason
        if gate_rank is not None:
            tags[GATE_RANK] = str(gate_rank)
        with self._lock:
            self._jobs[job_id] = replace(before, state=state)
        self._outbox.put([Tags(run_id=before.run_id, tags=as_tags({**tags, **(extra_tags or {})}))])
        if state.is_end:
            self._outbox.put_end(before.run_id, _RUN_STATUS.get(state, "KILLED"))
        elif before.state.is_end:
            self._outbox.put([Status(run_id=before.run_id, status="RUNNING", end_time=None)])

    @timed
    def open_again(self, job_ids: Sequence[str]) -> None:
        """Open the task's run, and those of jobs, that ended with a run of the task that failed or was cancelled."""
        for job_id in job_ids:
            if self._job(job_id).state.is_end:
                self.set_job_state(job_id, JobState.WAITING)
        tags = as_tags({STATE: TaskState.RUNNING.value, REASON: ""})
        self._outbox.put(
            [
                Tags(run_id=self.parent_run_id, tags=tags),
                Status(run_id=self.parent_run_id, status="RUNNING", end_time=None),
            ]
        )

    @timed
    def log_job_summary(self, outcome: JobOutcome) -> None:
        """Log how a job ended: best validation loss and its step, rows trained on and rows saved."""
        job = self._job(outcome.job_id)
        self._log_values(job.run_id, job_metrics(outcome, job.rows_per_update), outcome.step)

    @timed
    def log_task_summary(
        self,
        *,
        survivors: int,
        exited: int,
        samples_saved: float,
        tokens_per_second: float,
        best_val_loss: float | None,
    ) -> None:
        """Log where the task stands on the parent run, whose charts would be empty without.

        Args:
            survivors: jobs that have not ended early.
            exited: jobs that ended early.
            samples_saved: share of all budgeted rows that need not be trained on, in [0, 1].
            tokens_per_second: of the joint steps.
            best_val_loss: lowest validation loss of any job; None before the first.
        """
        values = {
            "survivors": survivors,
            "exited": exited,
            "samples_saved": samples_saved,
            "tokens_per_second": tokens_per_second,
        }
        if best_val_loss is not None:
            values["best_val_loss"] = best_val_loss
        self._log_values(self.parent_run_id, values, 0)

    @timed
    def log_scores(self, scores: Sequence[Score]) -> None:
        """Log held-out scores: an adapter's on its job's run (on test rows also on the parent), untuned ones there.

        Metric names are `<split>_loss` and `<split>_<metric>`, on the parent `untuned_<split>_...` for the base model.
        """
        for score in scores:
            named = score_metrics(score)
            if score.job_id is None:
                self._log_values(self.parent_run_id, {f"untuned_{name}": value for name, value in named.items()}, 0)
                continue
            self._log_values(self._job(score.job_id).run_id, named, 0)
            if score.split == "test":
                self._log_values(self.parent_run_id, named, 0)

    @contextmanager
    def system_metrics(self) -> Iterator[None]:
        """Log the use of GPU, memory, processor, disk and network on the parent run, every ten seconds of the block."""
        monitor = SystemMetricsMonitor(self.parent_run_id, resume_logging=True, tracking_uri=self._connection.uri)
        monitor.start()
        try:
            yield
        finally:
            monitor.finish()

    @timed
    def release(self, seconds: float | None = None) -> str:
        """Deliver what waits; the runs stay as they are. Another process may go on from here.

        Args:
            seconds: how long an MLflow is waited for that takes nothing; None: as long as any call.

        Returns:
            Why something still waits in the spool, and what becomes of it; empty when MLflow has everything.

        Raises:
            TrackingError: MLflow refused something.
        """
        return self._outbox.release(seconds)

    @timed
    def log_artifact(self, file: Path, folder: str | None = None) -> None:
        """Copy a file, as it is now, to the parent run."""
        self._outbox.put_copy(self.parent_run_id, file, folder)

    @timed
    def log_text(self, text: str, name: str) -> None:
        """Write a text artifact of the parent run; `name` is its path there."""
        self._outbox.put_text(self.parent_run_id, text, name)

    @timed
    def log_adapter(self, job_id: str, folder: Path) -> str:
        """Upload an exported PEFT adapter to the job's run; that it arrived whole is checked then.

        Returns:
            URI of the artifact folder.

        Raises:
            TrackingError: the folder is no PEFT adapter.
        """
        adapters.adapter_files(folder)
        run_id = self._job(job_id).run_id
        self._outbox.put_file(run_id, folder, adapters.ARTIFACT_FOLDER)
        return adapters.adapter_uri(run_id)

    @timed
    def register(
        self, *, name: str, job_id: str, adapter_folder: Path, tags: Mapping[str, str], facts: ServingFacts
    ) -> RegisteredAdapter:
        """Register an exported adapter as a version of a model, once MLflow has all that was logged.

        Raises:
            TrackingError: MLflow refused something, or stayed away; see `Registry.register`.
        """
        self.flush(self._connection.wait_seconds)
        return Registry(self._connection).register(
            name=name,
            experiment_id=self.experiment_id,
            run_id=self._job(job_id).run_id,
            folder=adapter_folder,
            tags={TASK_ID: self.task_id, JOB_ID: job_id, **tags},
            facts=facts,
        )

    @timed
    def close(self, state: TaskState, message: str = "") -> None:
        """End the parent run, and every child that is still open: such a job was cancelled with its task."""
        reason = f"the task ended ({state.value}){': ' + message if message else ''}"
        for job_id, job in list(self._jobs.items()):
            if not job.state.is_end:
                self.set_job_state(job_id, JobState.CANCELLED, reason=reason)
        tags = as_tags({STATE: state.value, REASON: message})
        self._outbox.put([Tags(run_id=self.parent_run_id, tags=tags)])
        self._outbox.put_end(self.parent_run_id, _TASK_STATUS[state])

    def _log_values(self, run_id: str, values: Mapping[str, float], step: int) -> None:
        self._outbox.put_values(run_id, step, {clean_name(key): float(value) for key, value in values.items()})

    def _job(self, job_id: str) -> TrackedJob:
        if job_id not in self._jobs:
            raise TrackingError(
                f"job {job_id!r}: got an unknown id, expected one of the {len(self._jobs)} jobs of task {self.task_id}"
            )
        return self._jobs[job_id]
