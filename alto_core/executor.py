"""The training loop of many jobs over one backbone: fill slots, step, evaluate, take verdicts, evict, backfill.

`Executor.run` is a generator. At each boundary it yields what was measured and waits for verdicts, so the executor
knows neither MLflow nor the early-exit rules, and a verdict takes effect at a fixed step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from alto_core.checkpointing import Checkpointer
from alto_core.cuts import Cut, Place, Session
from alto_core.data.rows import TaskData
from alto_core.device import is_out_of_memory
from alto_core.domain import Boundary, JobFailure, MemoryShortage, Verdict
from alto_core.engine.adapter_parallel import AnyEngine
from alto_core.engine.validation import evaluation_tokens
from alto_core.errors import EngineError, ModelError
from alto_core.interruption import StopQuestion, TaskStopped, never
from alto_core.job_rows import JobRows
from alto_core.job_run import JobRun
from alto_core.scheduling.intra_task import Capacity, JobSize, admit, without
from alto_core.validating import Validator


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
        max_eval_tokens: of one evaluation pass; None: as `evaluation_tokens` says. It changes speed and memory, not the
            numbers.
        asked_to_stop: asked after every joint step.
        checkpoints: writes states, and cuts where it has a log for them.
        session: what the cuts belong to; the same before and after a resume.
    """

    def __init__(
        self,
        engine: AnyEngine,
        data: TaskData,
        *,
        data_seed: int,
        step_tokens: float = math.inf,
        max_eval_tokens: int | None = None,
        asked_to_stop: StopQuestion = never,
        checkpoints: Checkpointer | None = None,
        session: Session | None = None,
    ):
        self._engine = engine
        self._asked_to_stop = asked_to_stop
        self._checkpoints, self._session = checkpoints or Checkpointer(), session
        self._capacity = Capacity(num_slots=engine.num_slots, rank_rows=engine.rank_rows, step_tokens=step_tokens)
        self._rows = JobRows(data.train.rows, data_seed)
        eval_tokens = max_eval_tokens or evaluation_tokens(engine.max_pass_tokens)
        self._validator = Validator(engine, data.validation.rows, eval_tokens)
        self._joined: list[str] = []
        self._failures: list[JobFailure] = []
        self._shortages: list[MemoryShortage] = []

    def run(self, runs: Sequence[JobRun]) -> Generator[Boundary, Sequence[Verdict | JobRun], None]:
        """Train every stretch to its end, or until a verdict ends the job.

        Jobs are admitted in decreasing adapter batch size and backfilled as slots come free: one of the batch size that
        left first, then any that fits. Runs that held a slot before get it back first, in their order. At the end the
        state and the best adapter of every job lie in its folder.
        When memory runs out the step is made again in smaller passes; where these are as small as a micro batch, the
        largest job is put back to wait. Neither changes a curve.

        Yields:
            A `Boundary` after each joint step at which a job was evaluated, when one could not be admitted, or when the
            task is to stop. Send the verdicts, and stretches of further jobs that are to have a slot. Steps in between
            are not waited for, so a job whose loss or gradient is no number any more shows it at the boundary; such
            steps update nothing.

        Raises:
            TaskStopped: the answer to `asked_to_stop`; all that was measured has been yielded, and where cuts are
                written the newest one is of this moment.
            EngineError: a state could not be written.
        """
        with self._checkpoints.writing():
            yield from self._run(runs)

    def _run(self, runs: Sequence[JobRun]) -> Generator[Boundary, Sequence[Verdict | JobRun], None]:
        waiting = {run.job.job_id: run for run in runs}
        active: dict[str, _Active] = {}
        self._failures = []
        for run in [run for run in runs if run.rank_start is not None]:
            if self._engine.fits(run.job, run.rank_start):
                self._place(run.job.job_id, waiting, active)
            else:  # an engine of another size, such as on fewer GPUs
                waiting[run.job.job_id] = replace(run, rank_start=None)
        self._backfill(waiting, active, None)
        started = time.monotonic()
        while active or self._failures:
            if active:
                self._step(waiting, active)
            for moved in active.values():
                moved.step += 1
            due, stop = [job_id for job_id, a in active.items() if _is_due(a)], self._asked_to_stop()
            is_boundary = bool(due or self._failures or stop)
            if is_boundary:
                answers = yield self._measure(due, waiting, active, since=started)
                self._heed(answers, waiting, active)
            for job_id, reached in [(j, a) for j, a in active.items() if a.step >= a.run.target_step]:
                self._save_leaving(reached.run)
                del active[job_id]
                self._leave(reached, waiting, active)
            # Only here: what a state was trained on must be in the curves before it.
            if is_boundary and (stop is not None or self._checkpoints.is_due()):
                self._cut(waiting, active)
            if stop is not None:
                raise TaskStopped(stop)
            if is_boundary:
                started = time.monotonic()
        self._cut(waiting, active)

    def _measure(
        self, due: Sequence[str], waiting: Mapping[str, JobRun], active: Mapping[str, _Active], *, since: float
    ) -> Boundary:
        """What came of the joint steps since a moment of the monotonic clock, and evaluations of the jobs due."""
        self._checkpoints.check()
        steps = self._engine.take_records()
        stepped = time.monotonic()
        standing = {job_id: (active[job_id].step, active[job_id].run.budget) for job_id in due}
        evaluations, smaller = self._validator.evaluate(standing) if due else ((), ())
        ended = time.monotonic()
        failures, self._failures = tuple(self._failures), []
        shortages, self._shortages = (*self._shortages, *smaller), []
        return Boundary(
            steps=steps,
            evaluations=evaluations,
            failures=failures,
            shortages=shortages,
            running=tuple(active),
            waiting=tuple(waiting),
            tokens_per_second=sum(record.num_tokens for record in steps) / max(ended - since, 1e-9),
            step_seconds=stepped - since,
            evaluation_seconds=ended - stepped,
        )

    def _heed(
        self, answers: Sequence[Verdict | JobRun], waiting: dict[str, JobRun], active: dict[str, _Active]
    ) -> None:
        """Take in the stretches that join, and end the jobs with a verdict."""
        joining = {answer.job.job_id: answer for answer in answers if isinstance(answer, JobRun)}
        waiting |= joining
        self._joined += joining
        for verdict in (answer for answer in answers if isinstance(answer, Verdict)):
            if waiting.pop(verdict.job_id, None) is not None:
                continue
            left = active.pop(verdict.job_id)
            self._save_leaving(left.run)
            self._leave(left, waiting, active)
        self._backfill(waiting, active, None)

    def _save_leaving(self, run: JobRun) -> None:
        job_id = run.job.job_id
        self._checkpoints.save(run.folder / "state", lambda: self._engine.snapshot(job_id))

    def _cut(self, waiting: Mapping[str, JobRun], active: Mapping[str, _Active]) -> None:
        """Note where every job stands. Not while a job that failed has yet to be told of: a cut would not know it."""
        if self._session is None or self._failures:
            return
        in_slots = [
            Place(job_id=job_id, step=a.step, rank_start=self._engine.rank_start(job_id))
            for job_id, a in active.items()
        ]
        in_line = [Place(job_id=job_id, step=run.start_step) for job_id, run in waiting.items()]
        states = {a.run.folder / "state": partial(self._engine.snapshot, job_id) for job_id, a in active.items()}
        cut = Cut(session=self._session, places=(*in_slots, *in_line), joined=tuple(self._joined))
        self._checkpoints.cut(cut, states)

    def _step(self, waiting: dict[str, JobRun], active: dict[str, _Active]) -> None:
        """Make one joint step, as often as it takes to fit into the memory that is left."""
        while active:
            try:
                self._engine.step({job_id: self._rows.of_step(a.run.job, a.step) for job_id, a in active.items()})
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            # Out of the block: what the error's frames hold is free again.
            self._make_room(waiting, active)

    def _make_room(self, waiting: dict[str, JobRun], active: dict[str, _Active]) -> None:
        """Halve the passes; where they hold a single micro batch, put the job with the largest one back to wait."""
        ahead = self._engine.ahead
        behind = {job_id: a for job_id, a in active.items() if job_id not in ahead}
        micro = {job_id: self._rows.largest_micro_batch(a.run.job, a.step) for job_id, a in behind.items()}
        largest = max(micro, key=lambda job_id: (micro[job_id], active[job_id].run.job.rank_rows, job_id))
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
        self._leave(left, waiting, active)

    def _put_back_to_wait(self, left: _Active, waiting: dict[str, JobRun], active: Mapping[str, _Active]) -> None:
        """Give the slot of a job back, with its state kept, and leave room for no more than what now runs."""
        run, job_id = left.run, left.run.job.job_id
        if left.step > run.start_step:
            self._save_leaving(run)
            run = replace(run, start_step=left.step, rank_start=None)
        self._engine.evict(job_id)
        waiting[job_id] = run
        still_running = [self._rows.size(a.run.job, a.step) for a in active.values()]
        self._capacity = without(self._capacity, self._rows.size(run.job, run.start_step), still_running)
        text = f"memory ran out: waits after step {left.step} with its state kept, {len(active)} others go on"
        self._shortages.append(
            MemoryShortage(text=text, max_pass_tokens=self._engine.max_pass_tokens, evicted_job_id=job_id)
        )

    def _leave(self, left: _Active, waiting: dict[str, JobRun], active: dict[str, _Active]) -> None:
        """Take a job out of its slot, its best adapter written down, and give the slot to a waiting one."""
        run = left.run
        if self._engine.has_best(run.job.job_id):
            self._engine.export(run.job.job_id, run.folder / "adapter", best=True)
        freed = self._rows.size(run.job, left.step)
        self._engine.evict(run.job.job_id)
        self._backfill(waiting, active, freed)

    def _backfill(self, waiting: dict[str, JobRun], active: dict[str, _Active], freed: JobSize | None) -> None:
        """Admit what fits; see `intra_task.admit`. What fits in no way, with all slots free, fails."""
        running = [self._rows.size(a.run.job, a.step) for a in active.values()]
        sizes = [self._rows.size(run.job, run.start_step) for run in waiting.values()]
        admit(sizes, running, self._capacity, freed, place=lambda size: self._place(size.job_id, waiting, active))
        if not active:
            for run in waiting.values():
                reason = (
                    f"does not fit: {run.job.rank_rows} rank rows, expected at most {self._engine.rank_rows} with the "
                    "memory there is. Use a smaller lora_rank, or a larger GPU."
                )
                self._failures.append(JobFailure(job_id=run.job.job_id, step=run.start_step, reason=reason))
            waiting.clear()

    def _place(self, job_id: str, waiting: dict[str, JobRun], active: dict[str, _Active]) -> bool:
        run = waiting[job_id]
        if run.rank_start is None and not self._engine.fits(run.job):
            return False
        del waiting[job_id]
        self._checkpoints.wait_for(run.folder / "state")
        try:
            step = self._admit(run)
        except (EngineError, ModelError) as error:
            self._failures.append(JobFailure(job_id=job_id, step=run.start_step, reason=str(error)))
            return False
        active[job_id] = _Active(run, step)
        return True

    def _admit(self, run: JobRun) -> int:
        """Returns the step that the job stands at: an earlier one where its state of `start_step` is damaged."""
        if run.start_step == 0:
            self._engine.admit(run.job, run.budget, init_adapter=run.init_adapter, rank_start=run.rank_start)
            return 0
        folder = run.folder / "state"
        return self._engine.restore(run.job, run.budget, folder, step=run.start_step, rank_start=run.rank_start)


def _is_due(active: _Active) -> bool:
    return active.step in active.run.budget.eval_steps or active.step == active.run.target_step
