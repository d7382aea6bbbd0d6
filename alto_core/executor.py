"""The training loop of many jobs over one backbone: fill slots, step, evaluate, take verdicts, evict, backfill.

`Executor.run` is a generator. At each boundary it yields what was measured and waits for verdicts, so the executor
knows neither MLflow nor the early-exit rules, and a verdict takes effect at a fixed step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alto_core.budget import rows_of_step
from alto_core.data.rows import TaskData, TokenRow
from alto_core.device import is_out_of_memory
from alto_core.domain import (
    Boundary,
    Evaluation,
    JobBudget,
    JobFailure,
    LoraJob,
    MemoryShortage,
    RowLosses,
    Verdict,
)
from alto_core.engine.engine import Engine
from alto_core.errors import EngineError, ModelError
from alto_core.evaluation.preference import preference_measures
from alto_core.interruption import StopQuestion, TaskStopped, never
from alto_core.scheduling.intra_task import Capacity, JobSize, admit, without

MAX_EVAL_TOKENS = 8192
"""Tokens of one evaluation batch."""
CHECKPOINT_SECONDS = 60.0
"""Between two saves of the jobs in slots: what a killed run loses at most."""


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
        step_tokens: token budget of a joint step.
        max_eval_tokens: of one evaluation pass. It changes speed and memory, not the numbers.
        asked_to_stop: asked after every joint step.
    """

    def __init__(
        self,
        engine: Engine,
        data: TaskData,
        *,
        data_seed: int,
        step_tokens: float = math.inf,
        max_eval_tokens: int = MAX_EVAL_TOKENS,
        asked_to_stop: StopQuestion = never,
    ):
        self._engine, self._data, self._data_seed = engine, data, data_seed
        self._asked_to_stop = asked_to_stop
        self._capacity = Capacity(num_slots=engine.num_slots, rank_rows=engine.rank_rows, step_tokens=step_tokens)
        rows = data.train.rows
        self._mean_row = sum(len(row.token_ids) for row in rows) / len(rows)
        self._eval_tokens = max_eval_tokens
        self._with_best: set[str] = set()
        self._put_back: set[str] = set()
        self._failures: list[JobFailure] = []
        self._shortages: list[MemoryShortage] = []

    def run(self, runs: Sequence[JobRun]) -> Generator[Boundary, Sequence[Verdict | JobRun], None]:
        """Train every stretch to its end, or until a verdict ends the job.

        Jobs are admitted in decreasing adapter batch size and backfilled as slots come free: one of the batch size that
        left first, then any that fits. At the end of a stretch the job's state and best adapter lie in its folder.
        When memory runs out the step is made again in smaller passes; where these are as small as a micro batch, the
        largest job is put back to wait. Neither changes a curve.

        Yields:
            A `Boundary` after each joint step at which a job was evaluated, when one could not be admitted, or when the
            task is to stop. Send the verdicts, and stretches of further jobs that are to have a slot. Steps in between
            are not waited for, so a job whose loss or gradient is no number any more shows it at the boundary; such
            steps update nothing.

        Raises:
            TaskStopped: the answer to `asked_to_stop`; all that was measured has been yielded, and the state of every
                job in a slot is saved.
        """
        waiting = {run.job.job_id: run for run in runs}
        active: dict[str, _Active] = {}
        self._failures = []
        self._backfill(waiting, active, None)
        started = saved = time.monotonic()
        while active or self._failures:
            if active:
                self._step(waiting, active)
            for moved in active.values():
                moved.step += 1
            due, stop = [job_id for job_id, a in active.items() if _is_due(a)], self._asked_to_stop()
            is_boundary = bool(due or self._failures or stop)
            if is_boundary:
                steps = self._engine.take_records()
                stepped = time.monotonic()
                evaluations = self._evaluate(due, active) if due else ()
                ended = time.monotonic()
                failures, self._failures = tuple(self._failures), []
                shortages, self._shortages = tuple(self._shortages), []
                answers = yield Boundary(
                    steps=steps,
                    evaluations=evaluations,
                    failures=failures,
                    shortages=shortages,
                    running=tuple(active),
                    tokens_per_second=sum(record.num_tokens for record in steps) / max(ended - started, 1e-9),
                    step_seconds=stepped - started,
                    evaluation_seconds=ended - stepped,
                )
                waiting |= {answer.job.job_id: answer for answer in answers if isinstance(answer, JobRun)}
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
            # Only here: what a state was trained on must be in the curves before it.
            if is_boundary and (stop is not None or time.monotonic() - saved > CHECKPOINT_SECONDS):
                self._save(active)
                saved = time.monotonic()
            if stop is not None:
                raise TaskStopped(stop)

    def _save(self, active: Mapping[str, _Active]) -> None:
        """A job that was never evaluated has no best adapter to keep; it starts again from its beginning."""
        for job_id in self._with_best & active.keys():
            self._engine.save(job_id, active[job_id].run.folder / "state")

    def _step(self, waiting: dict[str, JobRun], active: dict[str, _Active]) -> None:
        """Make one joint step, as often as it takes to fit into the memory that is left."""
        while active:
            try:
                self._engine.step({job_id: self._rows(a.run.job, a.step) for job_id, a in active.items()})
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the block: what the error's frames hold is free again.
            self._make_room(waiting, active)

    def _make_room(self, waiting: dict[str, JobRun], active: dict[str, _Active]) -> None:
        """Halve the passes; where they hold a single micro batch, put the job with the largest one back to wait."""
        micro = {job_id: self._micro_tokens(a) for job_id, a in active.items()}
        largest = max(micro, key=lambda job_id: (micro[job_id], active[job_id].run.job.lora_rank, job_id))
        tokens = min(self._engine.max_pass_tokens, sum(micro.values()))
        if tokens > micro[largest]:
            self._engine.limit_pass_tokens(max(tokens // 2, 1))
            text = f"memory ran out: passes of at most {self._engine.max_pass_tokens} tokens from now on"
            self._shortages.append(MemoryShortage(text=text, max_pass_tokens=self._engine.max_pass_tokens))
            return
        self._engine.limit_pass_tokens(tokens)
        left = active.pop(largest)
        if active:
            self._put_back_to_wait(left, waiting, active)
            return
        reason = (
            f"out of memory: one micro batch of {left.run.job.adapter_batch_size} rows, {micro[largest]} tokens, does "
            "not fit even alone. Use a smaller adapter_batch_size or data.max_length, or free memory."
        )
        self._failures.append(JobFailure(job_id=largest, step=left.step, reason=reason))
        self._leave(left.run, waiting, active)

    def _put_back_to_wait(self, left: _Active, waiting: dict[str, JobRun], active: Mapping[str, _Active]) -> None:
        """Give the slot of a job back, with its state kept, and leave room for no more than what now runs."""
        run, job_id = left.run, left.run.job.job_id
        if left.step > run.start_step:
            self._engine.save(job_id, run.folder / "state")
            run = replace(run, start_step=left.step)
            self._put_back.add(job_id)
        self._engine.evict(job_id)
        waiting[job_id] = run
        still_running = [self._size(a.run, a.step) for a in active.values()]
        self._capacity = without(self._capacity, self._size(run, run.start_step), still_running)
        text = f"memory ran out: waits after step {left.step} with its state kept, {len(active)} others go on"
        self._shortages.append(
            MemoryShortage(text=text, max_pass_tokens=self._engine.max_pass_tokens, evicted_job_id=job_id)
        )

    def _rows(self, job: LoraJob, steps_made: int) -> tuple[TokenRow, ...]:
        rows = self._data.train.rows
        indices = rows_of_step(
            step=steps_made + 1,
            num_train_rows=len(rows),
            rows_per_update=job.rows_per_update,
            seed=self._data_seed,
        )
        return tuple(rows[i] for i in indices)

    def _size(self, run: JobRun, steps_made: int) -> JobSize:
        next_rows = self._rows(run.job, steps_made)
        return JobSize(
            job_id=run.job.job_id,
            adapter_batch_size=run.job.adapter_batch_size,
            lora_rank=run.job.lora_rank,
            row_tokens=self._mean_row,
            next_row_tokens=sum(len(row.token_ids) for row in next_rows) / len(next_rows),
        )

    def _micro_tokens(self, active: _Active) -> int:
        """Tokens of the largest micro batch of a job's next step, which no pass divides."""
        size = active.run.job.adapter_batch_size
        lengths = [len(row.token_ids) for row in self._rows(active.run.job, active.step)]
        return max(sum(lengths[start : start + size]) for start in range(0, len(lengths), size))

    def _evaluate(self, due: Sequence[str], active: Mapping[str, _Active]) -> tuple[Evaluation, ...]:
        losses = self._row_losses(due)
        evaluations = []
        for job_id in due:
            step, budget = active[job_id].step, active[job_id].run.budget
            evaluation = Evaluation(
                job_id=job_id,
                step=step,
                fraction=budget.fraction(step),
                row_losses=losses[job_id],
                measures=preference_measures(losses[job_id]),
            )
            if self._engine.keep_best(job_id, evaluation.val_loss):
                self._with_best.add(job_id)
            evaluations.append(evaluation)
        return tuple(evaluations)

    def _row_losses(self, job_ids: Sequence[str]) -> dict[str, RowLosses]:
        """Losses of the validation rows, in passes as large as the memory allows."""
        rows = self._data.validation.rows
        longest = max(len(row.token_ids) for row in rows)
        while True:
            try:
                return self._engine.evaluate(job_ids, rows, max_tokens=self._eval_tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self._eval_tokens <= longest:
                    raise EngineError(
                        f"out of memory: a validation row of {longest} tokens does not fit. Use a smaller "
                        "data.max_length, or free memory."
                    ) from error
            self._eval_tokens = max(longest, min(self._eval_tokens, longest * len(rows) * len(job_ids)) // 2)
            self._engine.limit_pass_tokens(self._engine.max_pass_tokens)
            text = f"memory ran out: evaluation in passes of at most {self._eval_tokens} tokens from now on"
            self._shortages.append(MemoryShortage(text=text, max_pass_tokens=self._engine.max_pass_tokens))

    def _leave(self, run: JobRun, waiting: dict[str, JobRun], active: dict[str, _Active]) -> None:
        """Take a job out of its slot, its best adapter written down, and give the slot to a waiting one."""
        if run.job.job_id in self._with_best:
            self._engine.export(run.job.job_id, run.folder / "adapter", best=True)
        freed = self._size(run, run.start_step)
        self._engine.evict(run.job.job_id)
        self._backfill(waiting, active, freed)

    def _backfill(self, waiting: dict[str, JobRun], active: dict[str, _Active], freed: JobSize | None) -> None:
        """Admit what fits; see `intra_task.admit`. What fits in no way, with all slots free, fails."""
        running = [self._size(a.run, a.step) for a in active.values()]
        sizes = [self._size(run, run.start_step) for run in waiting.values()]
        admit(sizes, running, self._capacity, freed, place=lambda size: self._place(size.job_id, waiting, active))
        if not active:
            for run in waiting.values():
                reason = (
                    f"does not fit: rank {run.job.lora_rank}, expected at most {self._engine.rank_rows} with the "
                    "memory there is. Use a smaller lora_rank, or a larger GPU."
                )
                self._failures.append(JobFailure(job_id=run.job.job_id, step=run.start_step, reason=reason))
            waiting.clear()

    def _place(self, job_id: str, waiting: dict[str, JobRun], active: dict[str, _Active]) -> bool:
        run = waiting[job_id]
        if not self._engine.fits(run.job):
            return False
        del waiting[job_id]
        try:
            self._admit(run)
        except (EngineError, ModelError) as error:
            self._failures.append(JobFailure(job_id=job_id, step=run.start_step, reason=str(error)))
            return False
        active[job_id] = _Active(run, run.start_step)
        return True

    def _admit(self, run: JobRun) -> None:
        if run.start_step:
            self._engine.restore(run.job, run.budget, run.folder / "state")
            if run.job.job_id not in self._put_back:
                self._with_best.add(run.job.job_id)  # only jobs with a finite evaluation reach a second stretch
        else:
            self._engine.admit(run.job, run.budget, init_adapter=run.init_adapter)


def _is_due(active: _Active) -> bool:
    return active.step in active.run.budget.eval_steps or active.step == active.run.target_step
