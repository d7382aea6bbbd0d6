"""Opens the MLflow runs of a tuning task, once, and finds them again by their tags."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlflow.entities import Experiment, Run, ViewType
from mlflow.exceptions import MlflowException

from alto_core.config import TuningTask
from alto_core.domain import LoraJob
from alto_core.errors import TrackingError
from alto_core.ownership import Person
from alto_core.settings import Settings
from alto_core.tracking import description
from alto_core.tracking.connection import Connection, UnreachableError, timed
from alto_core.tracking.description import JOB_ID, JOB_INDEX, TASK_ID, WORKSPACE, DatasetSummary
from alto_core.tracking.known_runs import KnownRuns, note_runs, noted_runs, with_spooled_states
from alto_core.tracking.registry import Registry
from alto_core.tracking.runs import SPOOL_FOLDER, TaskRuns
from alto_core.tracking.spool import Spool

_TASK_ID_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_RUNS_PER_PAGE = 1000
_Call = Callable[..., Any]
"""`Connection.call`, or `Connection.attempt`."""


class Tracker:
    """The tracking of one ALTO home. Making one prepares the embedded database; a server is not asked yet.

    Raises:
        TrackingError: the embedded database cannot be used.
    """

    def __init__(self, settings: Settings):
        self._settings, self._connection = settings, Connection(settings)

    @timed
    def open_task(self, task: TuningTask, task_id: str, jobs: Sequence[LoraJob], data: DatasetSummary) -> TaskRuns:
        """The runs of a task: a parent, and one child per job for ever. Creates what is missing, keeps what is there.

        Raises:
            TrackingError: MLflow refused, the experiment or a run was deleted, or the id belongs to another task.
        """
        _check_task_id(task_id)
        with self._connection.exclusive():
            # with logins an experiment belongs to who made it, and nobody else may write into it
            owner = task.owner if self.person.name else None
            experiment_id = self._experiment_id(description.experiment_name(task, data, owner))
            runs = self._find_runs(task_id, [experiment_id], self._connection.call)
            parent = self._parent(task, task_id, experiment_id, runs, len(jobs), data)
            children = {run.data.tags[JOB_ID]: run for run in runs if JOB_ID in run.data.tags}
            for index, job in enumerate(jobs):
                run = children.get(job.job_id)
                if run is None:
                    tags = description.job_tags(
                        task, task_id, job, index, self._connection.workspace, parent.info.run_id
                    )
                    run = self._create_run(experiment_id, job.job_id, tags)
                if not run.data.params:  # new, or its creator died half-way
                    self._describe(run.info.run_id, description.job_params(task, job, data), data)
        return self.task_runs(task_id)

    @timed
    def task_runs(self, task_id: str) -> TaskRuns:
        """The runs of a task that was opened before, by this process or another.

        While MLflow is away they are as it had them when they were last asked for.

        Raises:
            TrackingError: there is no such task, one of its runs was deleted, or MLflow is away and nothing is known.
        """
        _check_task_id(task_id)
        task_folder = self._settings.task_folder(task_id)
        spool = Spool(task_folder / SPOOL_FOLDER)
        noted, start = noted_runs(spool.folder), spool.cursor
        try:
            runs = self._ask_for_runs(task_id, self._connection.attempt if noted else self._connection.call)
            note_runs(spool.folder, runs)
        except UnreachableError:
            if noted is None:
                raise
            runs, start = noted, 0
        return TaskRuns(
            self._connection,
            task_id=task_id,
            experiment_id=runs.experiment_id,
            parent_run_id=runs.parent_run_id,
            jobs=with_spooled_states(runs.jobs, spool, start),
            ema_alpha=runs.ema_alpha,
            task_folder=task_folder,
        )

    @property
    def person(self) -> Person:
        """Who is logged in to MLflow.

        Raises:
            TrackingError: MLflow cannot be reached.
        """
        return self._connection.person

    @property
    def registry(self) -> Registry:
        """The model registry of the same MLflow."""
        return Registry(self._connection)

    def _experiment_id(self, name: str) -> str:
        client, call = self._connection.client, self._connection.call
        experiment: Experiment | None = call("find the experiment", client.get_experiment_by_name, name)
        if experiment is None:
            try:
                return str(client.create_experiment(name, artifact_location=self._connection.artifact_location))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise TrackingError(f"experiment {name!r}: MLflow refused to create it ({error})") from error
            experiment = call("find the experiment", client.get_experiment_by_name, name)  # another machine was faster
        assert experiment is not None
        if experiment.lifecycle_stage != "active":
            raise TrackingError(
                f"experiment {name!r}: got a deleted one, expected an active one. Restore it with `mlflow experiments "
                f"restore --experiment-id {experiment.experiment_id}`, or delete it for good with `mlflow gc "
                f"--experiment-ids {experiment.experiment_id}`."
            )
        return str(experiment.experiment_id)

    def _ask_for_runs(self, task_id: str, call: _Call) -> KnownRuns:
        experiments = call("list experiments", self._connection.client.search_experiments, view_type=ViewType.ALL)
        runs = self._find_runs(task_id, [experiment.experiment_id for experiment in experiments], call)
        parent = next((run for run in runs if JOB_ID not in run.data.tags), None)
        if parent is None:
            raise TrackingError(
                f"task {task_id!r}: got no run of it in MLflow, expected one. Check ALTO_HOME and MLFLOW_TRACKING_URI."
            )
        children = [run for run in runs if JOB_ID in run.data.tags]
        return KnownRuns(
            experiment_id=parent.info.experiment_id,
            parent_run_id=parent.info.run_id,
            ema_alpha=float(parent.data.params["ema_alpha"]),
            jobs=tuple(map(description.tracked_job, sorted(children, key=lambda run: int(run.data.tags[JOB_INDEX])))),
        )

    def _find_runs(self, task_id: str, experiment_ids: Sequence[str], call: _Call) -> list[Run]:
        """Parent and children, in no order."""
        client, found, token = self._connection.client, list[Run](), None
        query = f"tags.`{TASK_ID}` = '{task_id}' and tags.`{WORKSPACE}` = '{self._connection.workspace}'"
        while token != "":
            page = call(
                "find the runs of the task",
                client.search_runs,
                list(experiment_ids),
                query,
                run_view_type=ViewType.ALL,
                max_results=_RUNS_PER_PAGE,
                page_token=token,
            )
            found += page
            token = page.token or ""
        for run in found:
            if run.info.lifecycle_stage != "active":
                raise TrackingError(
                    f"task {task_id!r}: got a deleted MLflow run ({run.info.run_name}), expected it to stay. "
                    f"Restore it with `mlflow runs restore --run-id {run.info.run_id}`, or submit the task anew."
                )
        return found

    def _parent(
        self,
        task: TuningTask,
        task_id: str,
        experiment_id: str,
        runs: Sequence[Run],
        num_jobs: int,
        data: DatasetSummary,
    ) -> Run:
        parent = next((run for run in runs if JOB_ID not in run.data.tags), None)
        if parent is None:
            tags = description.task_tags(task, task_id, self._connection.workspace)
            parent = self._create_run(experiment_id, task_id, tags)
        elif parent.data.tags.get("alto.task_digest") != task.digest:
            raise TrackingError(
                f"task {task_id!r}: got another task file than the one it was opened with. "
                "Submit the changed file as a new task."
            )
        if not parent.data.params:
            run_id = parent.info.run_id
            self._describe(run_id, description.task_params(task, num_jobs, data), data)
            text = json.dumps(task.model_dump(mode="json"), indent=2)
            self._connection.call("log the task file", self._connection.client.log_text, run_id, text, "task.json")
        return parent

    def _create_run(self, experiment_id: str, name: str, tags: Mapping[str, str]) -> Run:
        # not repeated by `call` when the answer is lost on the way: a second run of the same job must never come to be
        try:
            return self._connection.client.create_run(experiment_id, tags=description.as_tags(tags), run_name=name)
        except MlflowException as error:
            raise TrackingError(
                f"could not create the run of {name}: {error}. Resume the task: what was created is found again."
            ) from error

    def _describe(self, run_id: str, params: Sequence[description.Param], data: DatasetSummary) -> None:
        client, call = self._connection.client, self._connection.call
        call("log the data set", client.log_inputs, run_id, [description.dataset_input(data)])
        call("log parameters", client.log_batch, run_id, params=params)


def _check_task_id(task_id: str) -> None:
    if not re.fullmatch(_TASK_ID_PATTERN, task_id):
        raise TrackingError(f"task id {task_id!r}: expected letters, digits, '.', '_' or '-'")
