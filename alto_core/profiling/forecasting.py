"""How long a task's training will take: its jobs played through slots and passes, each part at its measured price."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alto_core.checkpointing import max_waiting_bytes
from alto_core.data.rows import TaskData
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.capture_choice import PassKind
from alto_core.profiling.passes_ahead import EngineAhead, PassAhead
from alto_core.profiling.task_profile import TaskRows, job_size
from alto_core.scheduling.intra_task import PackingPlan
from alto_core.scheduling.memory_model import ModelShape
from alto_core.scheduling.playing import JobWork, Round, play
from alto_core.scheduling.prediction import DurationTerms, Forecast, PassSpeed, SideCosts, with_early_exit

MAX_PLAYED_STEPS = 4000
"""Joint steps of a task whose passes are played; of a longer one some of each round, which stand for the others."""


@dataclass(frozen=True, kw_only=True)
class TaskAhead:
    """A task before it trains."""

    data: TaskData
    data_seed: int
    jobs: Sequence[LoraJob]
    budgets: Mapping[str, JobBudget]
    plan: PackingPlan
    """Capacity of all ranks, pass of one."""
    shape: ModelShape
    gates: Sequence[float] = ()
    """Shares of the budgets at which the jobs leave their slots, rising: each stretch has an engine of its own."""
    num_ranks: int = 1


def forecast_task(
    task: TaskAhead, speed: PassSpeed, costs: SideCosts, *, savings: float, gate_fraction: float
) -> Forecast:
    """How long a task's training will take.

    Args:
        task: its jobs, rows and slots.
        speed: of each rank's passes.
        costs: of what comes beside them; without what this process has done before.
        savings, gate_fraction: as in `with_early_exit`.
    """
    stretches = [(works, list(play(works, task.plan.capacity))) for works in _stretches(task)]
    rounds = [one for _, played in stretches for one in played]
    steps_of_each = max(1, MAX_PLAYED_STEPS // max(1, len(rounds)))
    terms = DurationTerms(start=costs.load_seconds, compilation=costs.compile_seconds)
    for works, played in stretches:
        restored = frozenset(work.job_id for work in works if work.first_step)
        terms += _Stretch(task, speed, costs, restored).play(played, steps_of_each)
    first_wave = len(rounds[0].steps_made) if rounds else 1
    in_use = [(one.num_steps, one.occupancy) for one in rounds if one.num_waiting]
    num_steps = sum(steps for steps, _ in in_use)
    num_jobs = len(task.jobs) - len(task.plan.too_large)
    return Forecast(
        seconds=with_early_exit(terms, savings=savings, gate_fraction=gate_fraction),
        terms=terms,
        num_jobs=num_jobs,
        waves=math.ceil(num_jobs / first_wave),
        occupancy=sum(steps * share for steps, share in in_use) / num_steps if num_steps else 1.0,
    )


def _stretches(task: TaskAhead) -> Iterator[list[JobWork]]:
    """What every job trains from one gate to the next."""
    rows = TaskRows.of(task.data)
    first = {job.job_id: 0 for job in task.jobs}
    for until in (*task.gates, 1.0):
        last = {job.job_id: task.budgets[job.job_id].step_at(until) for job in task.jobs}
        yield [
            JobWork(
                size=job_size(job, rows),
                first_step=first[job.job_id],
                last_step=last[job.job_id],
                eval_steps=task.budgets[job.job_id].eval_steps,
            )
            for job in task.jobs
            if job.job_id not in task.plan.too_large and last[job.job_id] > first[job.job_id]
        ]
        first = last


class _Stretch:
    """One stretch of training, in an engine on each rank. Ranks take turns in taking jobs, and wait for each other."""

    def __init__(self, task: TaskAhead, speed: PassSpeed, costs: SideCosts, restored: Collection[str]):
        self._speed, self._costs, self._restored = speed, costs, restored
        self._jobs = {job.job_id: job for job in task.jobs}
        self._engines = [
            EngineAhead(
                task.data,
                self._jobs,
                data_seed=task.data_seed,
                num_slots=math.ceil(task.plan.capacity.num_slots / task.num_ranks),
                max_pass_tokens=task.plan.max_pass_tokens,
                num_parameters=task.shape.num_parameters,
                captures=costs.captures,
            )
            for _ in range(task.num_ranks)
        ]
        self._waiting_seconds = costs.write_seconds * max_waiting_bytes() / max(1.0, costs.state_bytes)
        """To write all that may wait to be written."""

    def play(self, rounds: Sequence[Round], steps_of_each: int) -> DurationTerms:
        """Its terms.

        Args:
            rounds: of its jobs.
            steps_of_each: whose passes are played, at most.
        """
        terms = DurationTerms(start=self._costs.engine_seconds if rounds else 0.0)
        unwritten = 0.0
        for one in rounds:
            admitted, passes = self._admit(one.admitted), self._train(one, steps_of_each) + self._evaluate(one)
            unwritten = max(0.0, unwritten - passes.total)
            checkpoints, unwritten = self._leave(one.leaving, unwritten)
            terms += admitted + passes + DurationTerms(checkpoints=checkpoints)
        return terms + DurationTerms(checkpoints=unwritten)

    def _admit(self, job_ids: Sequence[str]) -> DurationTerms:
        restored, new = (
            sum(self._jobs[job_id].rank_rows for job_id in job_ids if (job_id in self._restored) == is_restored)
            for is_restored in (True, False)
        )
        return DurationTerms(checkpoints=restored * self._costs.restore_seconds, start=new * self._costs.admit_seconds)

    def _leave(self, job_ids: Sequence[str], unwritten: float) -> tuple[float, float]:
        """Seconds for which leaving jobs hold up the others, and of writing that is left then."""
        seconds = 0.0
        for job_id in job_ids:
            rank_rows = self._jobs[job_id].rank_rows
            held = max(0.0, unwritten - self._waiting_seconds) + rank_rows * self._costs.leave_seconds
            unwritten = max(0.0, unwritten - held) + rank_rows * self._costs.write_seconds
            seconds += held
        return seconds, unwritten

    def _train(self, one: Round, steps_of_each: int) -> DurationTerms:
        played = min(one.num_steps, steps_of_each)
        seconds = captures = 0.0
        for number in range(played):
            offset = number * one.num_steps // played
            steps_made = {job_id: step + offset for job_id, step in one.steps_made.items()}
            step, captured = self._slowest(
                engine.step(dict(itertools.islice(steps_made.items(), rank, None, len(self._engines))))
                for rank, engine in enumerate(self._engines)
            )
            seconds, captures = seconds + step, captures + captured
        return DurationTerms(training=seconds * one.num_steps / played, captures=captures)

    def _evaluate(self, one: Round) -> DurationTerms:
        ranks = range(len(self._engines))
        shares = [len(one.due[rank :: len(self._engines)]) for rank in ranks]
        seconds, captures = self._slowest(self._engines[rank].evaluation(shares[rank]) for rank in ranks)
        return DurationTerms(evaluation=seconds, captures=captures)

    def _slowest(self, passes_of_ranks: Iterable[Iterable[PassAhead]]) -> tuple[float, float]:
        """Seconds of the rank that takes longest, and of these in captures."""
        times = []
        for passes in passes_of_ranks:
            steady = captures = 0.0
            for one in passes:
                with_gradients = one.kind is not PassKind.LOSSES
                price = self._speed.pass_seconds if with_gradients else self._speed.evaluation_seconds
                steady += price(one.tokens)
                if one.must_capture:
                    costs = self._costs
                    captures += costs.capture_seconds if with_gradients else costs.evaluation_capture_seconds
            times.append((steady, captures))
        return max(times, key=sum)
