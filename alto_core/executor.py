"""The training loop of many jobs over one backbone: fill slots, step, evaluate, take verdicts, evict, backfill.

`Executor.run` is a generator. At each boundary it yields what was measured and waits for verdicts, so the executor
knows neither MLflow nor the early-exit rules, and a verdict takes effect at a fixed step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alto_core.budget import rows_of_step
from alto_core.data.rows import TaskData, TokenRow
from alto_core.domain import Boundary, Evaluation, JobBudget, JobFailure, LoraJob, Verdict
from alto_core.engine.engine import Engine
from alto_core.errors import EngineError, ModelError
from alto_core.interruption import StopQuestion, TaskStopped, never

CHECKPOINT_SECONDS = 60.0
"""Between two saves of the jobs in slots: what a killed run loses at most."""
MAX_EVAL_TOKENS = 8192
"""Tokens of one evaluation batch."""


@dataclass(frozen=True, kw_only=True)
class JobRun:
    """A stretch of one job's training: from where it stands to a step of its budget."""

    job: LoraJob
    budget: JobBudget
    folder: Path
    """Holds `state` (to continue from) and `adapter` (the best so far, in PEFT format)."""
    start_step: int
    """Updates already made; above 0 the job is restored from `folder/state`."""
    target_step: int
    """The stretch ends after this update."""
    init_adapter: Path | None = None


@dataclass
class _Active:
    run: JobRun
    step: int


class Executor:
    """Trains stretches of many jobs side by side.

    Args:
        engine: the slots over one frozen backbone.
        data: the task's tokenized rows; validation rows are the same for all jobs.
        data_seed: seeds the order of rows; the same for all jobs of a task.
        max_eval_tokens: of one evaluation pass. It changes speed and memory, not the numbers.
        asked_to_stop: asked after every joint step.
    """

    def __init__(
        self,
        engine: Engine,
        data: TaskData,
        *,
        data_seed: int,
        max_eval_tokens: int = MAX_EVAL_TOKENS,
        asked_to_stop: StopQuestion = never,
    ):
        self._engine, self._data, self._data_seed = engine, data, data_seed
        self._max_eval_tokens, self._asked_to_stop = max_eval_tokens, asked_to_stop
        self._with_best: set[str] = set()
        self._failures: list[JobFailure] = []

    def run(self, runs: Sequence[JobRun]) -> Generator[Boundary, Sequence[Verdict | JobRun], None]:
        """Train every stretch to its end, or until a verdict ends the job.

        Jobs are admitted in decreasing adapter batch size and backfilled as slots come free: one of the batch size that
        left first, then any that fits. At the end of a stretch the job's state and best adapter lie in its folder.

        Yields:
            A `Boundary` after each joint step at which a job was evaluated, or when one could not be admitted. Send the
            verdicts, and stretches of further jobs that are to have a slot. Steps in between are not waited for, so a
            job whose loss or gradient is no number any more shows it at the boundary; such steps update nothing.

        Raises:
            TaskStopped: the answer to `asked_to_stop`; the state of every job in a slot is saved by then.
        """
        waiting = deque(sorted(runs, key=lambda run: (-run.job.adapter_batch_size, -run.job.lora_rank, run.job.job_id)))
        active: dict[str, _Active] = {}
        self._failures = []
        self._backfill(waiting, active, None)
        started = saved = time.monotonic()
        while active or self._failures:
            if active:
                self._engine.step({job_id: self._rows(a) for job_id, a in active.items()})
            for moved in active.values():
                moved.step += 1
            due = [job_id for job_id, a in active.items() if _is_due(a)]
            if due or self._failures:
                steps = self._engine.take_records()
                stepped = time.monotonic()
                evaluations = self._evaluate(due, active) if due else ()
                ended = time.monotonic()
                failures, self._failures = tuple(self._failures), []
                answers = yield Boundary(
                    steps=steps,
                    evaluations=evaluations,
                    failures=failures,
                    running=tuple(active),
                    tokens_per_second=sum(record.num_tokens for record in steps) / max(ended - started, 1e-9),
                    step_seconds=stepped - started,
                    evaluation_seconds=ended - stepped,
                )
                waiting.extend(answer for answer in answers if isinstance(answer, JobRun))
                for verdict in (answer for answer in answers if isinstance(answer, Verdict)):
                    run = active.pop(verdict.job_id).run
                    self._engine.save(verdict.job_id, run.folder / "state")
                    self._leave(run, waiting, active)
                self._backfill(waiting, active, None)
                started = time.monotonic()
            for job_id, reached in [(j, a) for j, a in active.items() if a.step >= a.run.target_step]:
                self._engine.save(job_id, reached.run.folder / "state")
                del active[job_id]
                self._leave(reached.run, waiting, active)
            stop = self._asked_to_stop()
            if stop is not None or time.monotonic() - saved > CHECKPOINT_SECONDS:
                self._save(active)
                saved = time.monotonic()
            if stop is not None:
                raise TaskStopped(stop)

    def _save(self, active: Mapping[str, _Active]) -> None:
        """A job that was never evaluated has no best adapter to keep; it starts again from its beginning."""
        for job_id in self._with_best & active.keys():
            self._engine.save(job_id, active[job_id].run.folder / "state")

    def _rows(self, active: _Active) -> tuple[TokenRow, ...]:
        rows = self._data.train.rows
        indices = rows_of_step(
            step=active.step + 1,
            num_train_rows=len(rows),
            rows_per_update=active.run.job.rows_per_update,
            seed=self._data_seed,
        )
        return tuple(rows[i] for i in indices)

    def _evaluate(self, due: Sequence[str], active: Mapping[str, _Active]) -> tuple[Evaluation, ...]:
        losses = self._engine.evaluate(due, self._data.validation.rows, max_tokens=self._max_eval_tokens)
        evaluations = []
        for job_id in due:
            step, budget = active[job_id].step, active[job_id].run.budget
            evaluation = Evaluation(job_id=job_id, step=step, fraction=budget.fraction(step), row_losses=losses[job_id])
            if self._engine.keep_best(job_id, evaluation.val_loss):
                self._with_best.add(job_id)
            evaluations.append(evaluation)
        return tuple(evaluations)

    def _leave(self, run: JobRun, waiting: deque[JobRun], active: dict[str, _Active]) -> None:
        """Take a job out of its slot, its best adapter written down, and give the slot to a waiting one."""
        if run.job.job_id in self._with_best:
            self._engine.export(run.job.job_id, run.folder / "adapter", best=True)
        self._engine.evict(run.job.job_id)
        self._backfill(waiting, active, run.job.adapter_batch_size)

    def _backfill(self, waiting: deque[JobRun], active: dict[str, _Active], freed_batch_size: int | None) -> None:
        """Admit what fits: the batch size that came free first, so that the packed step keeps its size."""
        order = sorted(waiting, key=lambda run: run.job.adapter_batch_size != freed_batch_size)
        for run in order:
            if not self._engine.fits(run.job):
                continue
            waiting.remove(run)
            try:
                self._admit(run)
            except (EngineError, ModelError) as error:
                self._failures.append(JobFailure(job_id=run.job.job_id, step=run.start_step, reason=str(error)))
                continue
            active[run.job.job_id] = _Active(run, run.start_step)

    def _admit(self, run: JobRun) -> None:
        if run.start_step:
            self._engine.restore(run.job, run.budget, run.folder / "state")
            self._with_best.add(run.job.job_id)  # only jobs with a finite evaluation come this far
        else:
            self._engine.admit(run.job, run.budget, init_adapter=run.init_adapter)


def _is_due(active: _Active) -> bool:
    return active.step in active.run.budget.eval_steps or active.step == active.run.target_step
