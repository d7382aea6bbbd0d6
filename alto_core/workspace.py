"""Everything a stage needs to know about its task, found again from the task's id.

Stages exchange ids and paths; each opens the workspace anew, so a stage can run in another process than the one before.
Many commands only read, so what brings torch along is imported where it is used.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alto_core.budget import job_budget
from alto_core.config import TuningTask
from alto_core.containment import inside
from alto_core.cuts import CutLog
from alto_core.data.rows import TaskData
from alto_core.data.storage import load_task_data
from alto_core.data.tokenizer import load_model_tokenizer
from alto_core.decision_log import DecisionLog
from alto_core.domain import JobBudget, JobState, LoraJob, Stage
from alto_core.early_exit.policy import Policy, gate_fractions, make_policy
from alto_core.engine.state_folders import newest_step
from alto_core.errors import StoreError
from alto_core.job_run import JobRun
from alto_core.result import TaskResult
from alto_core.settings import Settings, load_settings
from alto_core.store import EventDraft, JobRecord, JobUpdate, Store
from alto_core.task_lock import times_held
from alto_core.tracking import TaskRuns, Tracker

if TYPE_CHECKING:
    from alto_core.engine.ranks import RankGroup
    from alto_core.evaluation import TextCodec
    from alto_core.references import References


@dataclass(frozen=True)
class Workspace:
    """One task: its file, jobs, rows, runs and folders."""

    task_id: str
    settings: Settings

    @classmethod
    def open(cls, task_id: str) -> Workspace:
        return cls(task_id, load_settings())

    @cached_property
    def store(self) -> Store:
        return Store(self.settings)

    @cached_property
    def task(self) -> TuningTask:
        return self.store.task(self.task_id).task

    @cached_property
    def data(self) -> TaskData:
        return load_task_data(inside(self.folder, "data"))

    @cached_property
    def jobs(self) -> Mapping[str, LoraJob]:
        return {record.job_id: record.job for record in self.store.jobs(self.task_id)}

    @cached_property
    def budgets(self) -> Mapping[str, JobBudget]:
        rows = len(self.data.train.rows)
        return {job_id: job_budget(job, self.task.budget, rows) for job_id, job in self.jobs.items()}

    @cached_property
    def policy(self) -> Policy:
        return make_policy(self.task.early_exit.preset, self.task.early_exit.overrides)

    @cached_property
    def gates(self) -> tuple[float, ...]:
        """Where they stand, as shares of each job's own budget; the first is the warmup gate."""
        return gate_fractions(self.policy, self.task.budget.gate_warmup_fraction, self.budgets.values())

    @cached_property
    def decisions(self) -> DecisionLog:
        return DecisionLog(self.folder)

    @cached_property
    def codec(self) -> TextCodec:
        """The model's tokenizer, as evaluation uses it."""
        from alto_core.evaluation import TextCodec

        tokenizer = load_model_tokenizer(self.task.model).tokenizer
        return TextCodec(
            encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
            decode=lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True)),
            spell=lambda token_ids: str(tokenizer.decode(token_ids)),
        )

    @cached_property
    def references(self) -> References | None:
        """What the task's jobs are held to, as far as it has been measured; None where the objective needs none."""
        if self.task.objective != "dpo":
            return None
        from alto_core.engine.backbone import load_backbone
        from alto_core.references import References, fingerprint, reference_key

        ranks = self.ranks()
        backbone = (
            fingerprint(load_backbone(self.task.model, self.device)) if ranks is None else ranks.on_all(fingerprint)[0]
        )
        key = reference_key(self.data.digest, backbone, self.init_adapter)
        return References(self.settings.home / "references" / f"{key}.parquet")

    @property
    def init_adapter(self) -> Path | None:
        """The adapter that every job starts from."""
        return Path(self.task.init_adapter) if self.task.init_adapter else None

    @property
    def folder(self) -> Path:
        return self.settings.task_folder(self.task_id)

    @property
    def device(self) -> str:
        from alto_core.device import pick_device

        return pick_device(self.settings.device)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where its jobs may train: as many devices as the task file asks for, or as there are."""
        from alto_core.device import pick_devices

        asked = self.task.cluster.num_gpus
        return pick_devices(self.settings.device, None if asked == "auto" else asked)

    def ranks(self) -> RankGroup | None:
        """The processes of the devices that the profile stage chose; None where it is one, which this process uses."""
        from alto_core.engine.ranks import rank_group

        profile = self.store.profile(self.task_id)
        if profile is None or profile.num_ranks == 1:
            return None
        return rank_group(self.task.model, self.devices[: profile.num_ranks], sharded=profile.sharded)

    @property
    def revision(self) -> str:
        """Tells this task from any other of the same id, such as one in another workspace; for Prefect's cache keys."""
        record = self.store.task(self.task_id)
        return f"{self.task.digest}-{record.created_at.isoformat()}"

    @property
    def result(self) -> TaskResult:
        """What has come out so far."""
        return TaskResult.from_dict(self.store.task(self.task_id).result or {})

    def update_result(self, **fields: Any) -> None:
        """Change fields of the task's result."""
        self.store.set_task_fields(self.task_id, result=dataclasses.replace(self.result, **fields).to_dict())

    @property
    def was_begun(self) -> bool:
        """Whether an earlier run was at work on it, so that something may be written down already."""
        return times_held(self.folder) > 1

    @cached_property
    def cuts(self) -> CutLog:
        return CutLog(self.folder / "cuts")

    def states_of(self, job_id: str) -> Path:
        """Folder of a job's training states."""
        return self.job_folder(job_id) / "state"

    @property
    def report_file(self) -> Path:
        return self.folder / "report.html"

    def job_folder(self, job_id: str) -> Path:
        """Holds `state` (to continue from) and `adapter` (the best so far, in PEFT format)."""
        return inside(self.folder, "jobs", job_id)

    def find_job(self, text: str) -> str:
        """The job that an id, or the beginning of just one id, names.

        Raises:
            StoreError: no job, or several.
        """
        found = [job_id for job_id in self.jobs if job_id.startswith(text)]
        if text in self.jobs or len(found) == 1:
            return text if text in self.jobs else found[0]
        which = f"the beginning of {len(found)} ids" if found else "an unknown id"
        near = found or difflib.get_close_matches(text, self.jobs, n=3, cutoff=0.3) or list(self.jobs)[:3]
        raise StoreError(
            f"job {text!r}: got {which}, expected one of the {len(self.jobs)} jobs of task {self.task_id}, such as "
            f"{', '.join(near[:3])}"
        )

    def checkpoint_step(self, job_id: str) -> int:
        """Step of a job's newest saved state; 0 when it has none."""
        return newest_step(self.states_of(job_id))

    def rewind(self) -> None:
        """Set every open job to where it goes on: what it trained after that is lost with its run."""
        cut = self.cuts.newest_readable()
        steps = cut.steps if cut else {}
        updates = [
            JobUpdate(job_id=job_id, state=JobState.WAITING, step=steps.get(job_id, self.checkpoint_step(job_id)))
            for job_id, record in self.records().items()
            if not record.state.is_end
        ]
        self.store.update_jobs(self.task_id, updates)

    def records(self) -> Mapping[str, JobRecord]:
        """Where each job stands now."""
        return {record.job_id: record for record in self.store.jobs(self.task_id)}

    def alive(self) -> tuple[str, ...]:
        """Ids of the jobs that have not ended, in their first order."""
        return tuple(job_id for job_id, record in self.records().items() if not record.state.is_end)

    def ended_as(self, *states: JobState) -> tuple[str, ...]:
        return tuple(job_id for job_id, record in self.records().items() if record.state in states)

    def stretches(self, job_ids: Sequence[str], *, until: float) -> tuple[JobRun, ...]:
        """What the executor trains next: each job from where it stands to a share of its own budget."""
        records = self.records()
        runs = (self.stretch(job_id, start_step=records[job_id].step, until=until) for job_id in job_ids)
        return tuple(run for run in runs if run.target_step > run.start_step)

    def stretch(self, job_id: str, *, start_step: int, until: float, rank_start: int | None = None) -> JobRun:
        """One job's training from a step to a share of its budget."""
        budget = self.budgets[job_id]
        return JobRun(
            job=self.jobs[job_id],
            budget=budget,
            folder=self.job_folder(job_id),
            start_step=start_step,
            target_step=budget.step_at(until),
            init_adapter=self.init_adapter,
            rank_start=rank_start,
        )

    @contextmanager
    def tracked(self, wait_seconds: float | None = None) -> Iterator[TaskRuns]:
        """The task's MLflow runs. When the block ends what was logged is delivered, and its cost is recorded.

        Args:
            wait_seconds: how long an MLflow is waited for that is away; None: as long as any call. What it does not get
                then stays in the task's spool, and a warning says so.
        """
        runs = Tracker(self.settings).task_runs(self.task_id)
        try:
            yield runs
        finally:
            waiting = runs.release(wait_seconds)
            warnings = [EventDraft(kind="warning", text=waiting)] if waiting else []
            self.store.append_events(self.task_id, [tracking_event(runs), *warnings])

    def begin(self, stage: Stage) -> None:
        """Show the task in this stage."""
        self.store.set_stage(self.task_id, stage)
        self.store.append_events(self.task_id, [EventDraft(kind="stage", text=stage)])


def tracking_event(runs: TaskRuns) -> EventDraft:
    """How long callers waited for MLflow; the sum over a task is its tracking share."""
    seconds = runs.seconds_spent
    return EventDraft(kind="tracking", text=f"{seconds:.2f} s in MLflow", numbers={"seconds": seconds})
