"""The MLflow runs of one tuning task: a parent for the task and a child per job.

What is logged goes out by the side thread of `writer`; what is read comes through `series`. Opening and finding the
runs is `client`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from mlflow.entities import Metric
from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

from alto_core.domain import Evaluation, JobOutcome, JobState, Score, StepRecord, TaskState
from alto_core.early_exit.curves import Curve
from alto_core.errors import TrackingError
from alto_core.tracking import adapters
from alto_core.tracking.connection import Connection, timed
from alto_core.tracking.description import (
    GATE_RANK,
    JOB_ID,
    REASON,
    STATE,
    TASK_ID,
    JobRun,
    as_tags,
    job_metrics,
    score_metrics,
)
from alto_core.tracking.history import HistoryReader
from alto_core.tracking.names import clean_name
from alto_core.tracking.packaging import ServingFacts
from alto_core.tracking.registry import RegisteredAdapter, Registry
from alto_core.tracking.rows import RowLossArchive
from alto_core.tracking.series import VAL_LOSS, CurveCache
from alto_core.tracking.sums import RunningSums, now_ms
from alto_core.tracking.writer import Writer

_RUN_STATUS = {JobState.FINISHED: "FINISHED", JobState.FAILED: "FAILED"}
_TASK_STATUS = {TaskState.FINISHED: "FINISHED", TaskState.FAILED: "FAILED", TaskState.CANCELLED: "KILLED"}


class TaskRuns:
    """Logs and reads one task. Metrics and states go out in the background; `flush` waits and tells what went wrong.

    Safe to use from several threads. One process at a time logs a task; any number may read it.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        task_id: str,
        experiment_id: str,
        parent_run_id: str,
        jobs: Sequence[JobRun],
        ema_alpha: float,
    ):
        self.task_id = task_id
        self.experiment_id = experiment_id
        self.parent_run_id = parent_run_id
        self._connection = connection
        self._jobs = {job.job_id: job for job in jobs}
        self._lock = threading.RLock()
        self._writer = Writer(connection)
        self._rows = RowLossArchive(connection, parent_run_id)
        self._curves = CurveCache(HistoryReader(connection))
        self._sums = RunningSums(HistoryReader(connection), ema_alpha)

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
            TrackingError: only where a job does not go on where it stood: its history is read for the running sums.
        """
        run_ids = {record.job_id: self._job(record.job_id).run_id for record in records}
        with self._lock:
            metrics = self._sums.metrics(records, run_ids, self._writer.flush)
            for record in records:
                self._curves.note_step(record.job_id, record.step)
            for job_id, of_job in metrics.items():
                self._writer.add(run_ids[job_id], metrics=of_job)

    @timed
    def log_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Log the evaluations of one boundary: validation losses, and all row losses as one artifact of the parent."""
        now = now_ms()
        for evaluation in evaluations:
            run_id = self._job(evaluation.job_id).run_id
            with self._lock:
                self._curves.note_evaluation(evaluation.job_id, evaluation.step)
            values = {VAL_LOSS: evaluation.val_loss, **evaluation.measures}
            metrics = [Metric(key, value, now, evaluation.step) for key, value in values.items()]
            self._writer.add(run_id, metrics=metrics)
        if evaluations:
            kept = tuple(evaluations)
            self._writer.add_operation("log the row losses", lambda: self._rows.write(kept))

    @timed
    def flush(self) -> None:
        """Return when everything logged so far can be read back.

        Raises:
            TrackingError: MLflow refused a write, or stayed away. In the second case the next flush tries again.
        """
        self._writer.flush()

    @timed
    def read_curves(self, job_ids: Sequence[str] | None = None) -> dict[str, Curve]:
        """The curves as they stand in MLflow, row losses included, in one bulk read of what came since the last call.

        Args:
            job_ids: None for all jobs.

        Raises:
            TrackingError: MLflow cannot be reached, or the task has no such job.
        """
        wanted = list(self._jobs) if job_ids is None else list(job_ids)
        with self._lock:
            return self._curves.read([self._job(job_id) for job_id in wanted], self._rows.read())

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
        with self._lock:
            before = self._job(job_id)
            self._jobs[job_id] = replace(before, state=state)
        run_id = before.run_id
        tags = {STATE: state.value}
        if reason or before.state.is_end:
            tags[REASON] = reason
        if gate_rank is not None:
            tags[GATE_RANK] = str(gate_rank)
        self._writer.add(run_id, tags=as_tags({**tags, **(extra_tags or {})}))
        client = self._connection.client
        if state.is_end:
            status, ended = _RUN_STATUS.get(state, "KILLED"), now_ms()
            self._writer.add_operation(
                f"end the run of job {job_id}", lambda: client.set_terminated(run_id, status, end_time=ended)
            )
        elif before.state.is_end:
            self._writer.add_operation(
                f"open the run of job {job_id} again", lambda: client.update_run(run_id, status="RUNNING")
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
        scores: Mapping[str, float] | None = None,
        step: int = 0,
    ) -> None:
        """Log where the task stands on the parent run, whose charts would be empty without.

        Args:
            survivors: jobs that have not ended early.
            exited: jobs that ended early.
            samples_saved: share of all budgeted rows that need not be trained on, in [0, 1].
            tokens_per_second: of the joint steps.
            best_val_loss: lowest validation loss of any job; None before the first.
            scores: held-out scores of the winner and the untuned model, by name.
            step: the x of the chart, for example the number of the boundary.
        """
        values = {
            "survivors": survivors,
            "exited": exited,
            "samples_saved": samples_saved,
            "tokens_per_second": tokens_per_second,
        }
        if best_val_loss is not None:
            values["best_val_loss"] = best_val_loss
        self._log_values(self.parent_run_id, {**values, **(scores or {})}, step)

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
    def release(self) -> None:
        """Write what waits; the runs stay as they are. Another process may go on from here.

        Raises:
            TrackingError: something could not be written.
        """
        self._writer.flush()

    @timed
    def log_artifact(self, file: Path, folder: str | None = None) -> None:
        """Copy a file to the parent run.

        Raises:
            TrackingError: MLflow did not take it.
        """
        self._connection.call(
            f"log {file.name}", self._connection.client.log_artifact, self.parent_run_id, str(file), folder
        )

    @timed
    def log_text(self, text: str, name: str) -> None:
        """Write a text artifact of the parent run; `name` is its path there.

        Raises:
            TrackingError: MLflow did not take it.
        """
        self._connection.call(f"log {name}", self._connection.client.log_text, self.parent_run_id, text, name)

    @timed
    def log_adapter(self, job_id: str, folder: Path) -> str:
        """Upload an exported PEFT adapter to the job's run and check that it arrived whole.

        Returns:
            URI of the artifact folder.

        Raises:
            TrackingError: the folder is no PEFT adapter, or MLflow did not take it.
        """
        return adapters.log_adapter(self._connection, self._job(job_id).run_id, folder)

    @timed
    def register(
        self, *, name: str, job_id: str, adapter_folder: Path, tags: Mapping[str, str], facts: ServingFacts
    ) -> RegisteredAdapter:
        """Register an exported adapter as a version of a model; see `Registry.register`."""
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
        """End the parent run, and every child that is still open: such a job was cancelled with its task.

        Raises:
            TrackingError: something could not be written. If MLflow was away, it is tried on while this process lives.
        """
        reason = f"the task ended ({state.value}){': ' + message if message else ''}"
        for job_id, job in list(self._jobs.items()):
            if not job.state.is_end:
                self.set_job_state(job_id, JobState.CANCELLED, reason=reason)
        self._writer.add(self.parent_run_id, tags=as_tags({STATE: state.value, REASON: message}))
        client, ended = self._connection.client, now_ms()
        self._writer.add_operation(
            "end the run of the task",
            lambda: client.set_terminated(self.parent_run_id, _TASK_STATUS[state], end_time=ended),
        )
        self._writer.flush()

    def _log_values(self, run_id: str, values: Mapping[str, float], step: int) -> None:
        now = now_ms()
        self._writer.add(
            run_id, metrics=[Metric(clean_name(key), float(value), now, step) for key, value in values.items()]
        )

    def _job(self, job_id: str) -> JobRun:
        if job_id not in self._jobs:
            raise TrackingError(
                f"job {job_id!r}: got an unknown id, expected one of the {len(self._jobs)} jobs of task {self.task_id}"
            )
        return self._jobs[job_id]
