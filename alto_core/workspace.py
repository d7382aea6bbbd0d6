"""Everything a stage needs to know about its task, found again from the task's id.

Stages exchange ids and paths; each opens the workspace anew, so a stage can run in another process than the one before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from alto_core.budget import job_budget
from alto_core.config import TuningTask
from alto_core.data.rows import TaskData
from alto_core.data.storage import load_task_data
from alto_core.data.tokenizer import load_model_tokenizer
from alto_core.device import pick_device
from alto_core.domain import JobBudget, JobState, LoraJob, Stage
from alto_core.early_exit.policy import Policy, make_policy
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.executor import JobRun
from alto_core.result import TaskResult
from alto_core.settings import Settings, load_settings
from alto_core.store import EventDraft, JobRecord, Store
from alto_core.tracking import TaskRuns, Tracker


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
        return load_task_data(self.folder / "data")

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
    def decode(self) -> Callable[[Sequence[int]], str]:
        """Token ids to text, special tokens left out."""
        tokenizer = load_model_tokenizer(self.task.model).tokenizer
        return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))

    @property
    def folder(self) -> Path:
        return self.settings.task_folder(self.task_id)

    @property
    def device(self) -> str:
        return pick_device(self.settings.device)

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
    def report_file(self) -> Path:
        return self.folder / "report.html"

    def job_folder(self, job_id: str) -> Path:
        """Holds `state` (to continue from) and `adapter` (the best so far, in PEFT format)."""
        return self.folder / "jobs" / job_id

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
        runs = []
        for job_id in job_ids:
            budget = self.budgets[job_id]
            target = budget.step_at(until)
            if target > records[job_id].step:
                runs.append(
                    JobRun(
                        job=self.jobs[job_id],
                        budget=budget,
                        folder=self.job_folder(job_id),
                        start_step=records[job_id].step,
                        target_step=target,
                        init_adapter=Path(self.task.init_adapter) if self.task.init_adapter else None,
                    )
                )
        return tuple(runs)

    @contextmanager
    def tracked(self) -> Iterator[TaskRuns]:
        """The task's MLflow runs. When the block ends everything logged is written, and its cost is recorded."""
        runs = Tracker(self.settings).task_runs(self.task_id)
        try:
            yield runs
        finally:
            runs.release()
            self.store.append_events(self.task_id, [tracking_event(runs)])

    @contextmanager
    def engine(
        self,
        job_ids: Sequence[str],
        *,
        num_slots: int,
        rank_rows: int | None = None,
        max_pass_tokens: int | None = None,
    ) -> Iterator[Engine]:
        """Slots for so many of these jobs at once over the task's backbone.

        Args:
            job_ids: the jobs.
            num_slots: most of them at a time.
            rank_rows: upper bound on the sum of their ranks; None: what the largest ones need.
            max_pass_tokens: of one training pass; None: by kind of device.
        """
        jobs = [self.jobs[job_id] for job_id in job_ids]
        largest = sorted((job.lora_rank for job in jobs), reverse=True)[:num_slots]
        rank_rows = min(sum(largest), rank_rows or sum(largest))
        engine = Engine(
            load_backbone(self.task.model, self.device),
            target_modules=sorted({name for job in jobs for name in job.target_modules}),
            num_slots=num_slots,
            rank_rows=rank_rows,
            max_lora_rank=min(largest[0], rank_rows),
            max_pass_tokens=max_pass_tokens,
            max_row_tokens=max(len(row.token_ids) for row in (*self.data.train.rows, *self.data.validation.rows)),
            recomputed=self.task.activation_checkpointing,
            cuda_graph=self.settings.cuda_graph,
        )
        try:
            yield engine
        finally:
            engine.close()

    def begin(self, stage: Stage) -> None:
        """Show the task in this stage."""
        self.store.set_stage(self.task_id, stage)
        self.store.append_events(self.task_id, [EventDraft(kind="stage", text=stage)])


def tracking_event(runs: TaskRuns) -> EventDraft:
    """How long callers waited for MLflow; the sum over a task is its tracking share."""
    seconds = runs.seconds_spent
    return EventDraft(kind="tracking", text=f"{seconds:.2f} s in MLflow", numbers={"seconds": seconds})
