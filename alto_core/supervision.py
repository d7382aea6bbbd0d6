"""The loop around the executor: log each boundary, read the curves back, ask the policy, hand over its verdicts.

The one place where measurements, curves, decisions and records meet. It makes no decision of its own. A decision is
in the log before anything comes of it, and an end is in the spool of the tracking before it is in the store, so that a
run that dies in between can be gone on with: what the log holds and the store does not is recorded again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Mapping, Sequence
from pathlib import Path

from alto_core import wording
from alto_core.cancelling import CancelRequests, cancelled
from alto_core.decision_log import ARTIFACT_NAME, DecisionLog, exit_entry
from alto_core.domain import Boundary, CurveSource, GateDecision, JobFailure, JobState, Verdict
from alto_core.earlier_run import EarlierRun
from alto_core.early_exit.curves import Curve
from alto_core.early_exit.policy import Policy
from alto_core.executor import Executor
from alto_core.job_run import JobRun
from alto_core.outcomes import JobOutcome
from alto_core.progress import Progress
from alto_core.store import EventDraft, JobUpdate, Store
from alto_core.tracking import TaskRuns

DEATHS = (JobState.DIVERGING, JobState.FAILED)
"""Ends of a job that was to train on, and cannot."""


class Supervisor:
    """Watches the jobs of one task.

    Args:
        task_id: the task.
        policy: its early-exit rules.
        runs: its MLflow runs.
        store: where states and events are kept for `alto status`.
        decisions: its decision log.
        savings: share of the training rows that early exit is expected to spare, for the time left.
        earlier: what a run that died had decided and recorded.
    """

    def __init__(
        self,
        *,
        task_id: str,
        policy: Policy,
        runs: TaskRuns,
        store: Store,
        decisions: DecisionLog,
        savings: float = 0.0,
        earlier: EarlierRun | None = None,
    ):
        self._task_id, self._policy, self._runs, self._store = task_id, policy, runs, store
        self._decisions, self._savings = decisions, savings
        self._earlier = earlier or EarlierRun()
        self._recorded = set(self._earlier.recorded)
        self._cancel_requests = CancelRequests(task_id, store)

    def train(self, executor: Executor, stretches: Sequence[JobRun], reserve: Sequence[JobRun] = ()) -> None:
        """Train every stretch to its end or to its verdict. On return all measurements and adapters are in MLflow.

        Args:
            executor: has room for the stretches.
            stretches: what to train.
            reserve: parked jobs, the best first. For each job that dies (diverges or fails) the next one is revived.
        """
        progress = Progress(self._task_id, self._store, savings=self._savings, evaluated=self._earlier.evaluated)
        by_id, waiting = {stretch.job.job_id: stretch for stretch in stretches}, list(reserve)
        session = executor.run(stretches)
        boundary = next(session, None)
        while boundary is not None:
            asked = self._asked_to_cancel(boundary)
            curves = self._record(boundary, progress, asked)
            verdicts = [cancelled(job_id, curves[job_id].last_step, reason) for job_id, reason in asked.items()]
            verdicts += [verdict for verdict in self._judge(boundary, curves) if verdict.job_id not in asked]
            ended = [*verdicts, *map(_as_verdict, boundary.failures)]
            revived = [waiting.pop(0) for verdict in ended if verdict.state in DEATHS and waiting]
            by_id |= {stretch.job.job_id: stretch for stretch in revived}
            spent = _spent(boundary, by_id, {verdict.job_id for verdict in verdicts})
            self.decide([*ended, *spent], curves)
            for stretch in revived:
                self.reopen(stretch, f"revived in place of {_names(ended)}")
            following = _advance(session, [*verdicts, *revived])
            for verdict in (*ended, *spent):
                self.end(by_id[verdict.job_id].folder, curves[verdict.job_id], verdict)
            progress.note_speed(boundary)
            boundary = following
        self._publish_decisions()

    def reopen(self, stretch: JobRun, reason: str) -> None:
        """Record that a job which had ended early goes on."""
        job_id = stretch.job.job_id
        if job_id in self._earlier.exits or not self._states()[job_id].is_end:
            return  # an earlier run has done so
        back = Verdict(job_id=job_id, state=JobState.RUNNING, step=stretch.start_step, reason=reason, evidence={})
        self._decisions.add([exit_entry(self._policy.name, back, stretch.budget.total_steps)])
        self._runs.set_job_state(job_id, JobState.RUNNING, reason=reason)
        self._store.reopen_job(self._task_id, job_id)
        self._store.append_events(self._task_id, [EventDraft(kind="revived", job_id=job_id, text=reason)])
        self._recorded.discard(job_id)

    def apply_gate(
        self, fraction: float, decision: GateDecision, curves: dict[str, Curve], folders: dict[str, Path]
    ) -> None:
        """End the jobs that a gate ended, and record every job's place in it."""
        total_steps = {job_id: curve.total_steps for job_id, curve in curves.items()}
        sources = {entry.job_id: self._runs.curve_source(entry.job_id) for entry in decision.entries}
        self._decisions.add_gate(self._policy.name, fraction, decision, total_steps, sources)
        ranks = {entry.job_id: entry.gate_rank for entry in decision.entries}
        self._store.update_jobs(
            self._task_id,
            [JobUpdate(job_id=job_id, gate_rank=rank) for job_id, rank in ranks.items() if rank is not None],
        )
        states = self._states()
        for entry in decision.entries:
            if entry.kept and not states[entry.job_id].is_end:
                self._runs.set_job_state(entry.job_id, JobState.RUNNING, reason=entry.reason, gate_rank=entry.gate_rank)
        for verdict in decision.verdicts:
            rank = ranks[verdict.job_id]
            self.end(folders[verdict.job_id], curves[verdict.job_id], verdict, gate_rank=rank)
        self._store.append_events(
            self._task_id,
            [EventDraft(kind="gate", text=wording.gate(decision))],
        )
        self._publish_decisions()

    def end(self, folder: Path, curve: Curve, verdict: Verdict, *, gate_rank: int | None = None) -> None:
        """Record a job's end everywhere, once: adapter and verdict for MLflow, then state and event in the store.

        The decision log has it already.
        """
        if verdict.job_id in self._recorded:
            return
        outcome = outcome_of(curve, verdict, gate_rank)
        adapter = folder / "adapter"
        if adapter.is_dir():
            self._runs.log_adapter(verdict.job_id, adapter)
        self._runs.log_job_summary(outcome)
        self._runs.set_job_state(
            verdict.job_id,
            verdict.state,
            reason=verdict.reason,
            gate_rank=gate_rank,
            extra_tags=verdict_tags(self._policy.name, verdict, curve.total_steps, self._judged_source(verdict)),
        )
        self._store.update_jobs(
            self._task_id,
            [JobUpdate(job_id=verdict.job_id, state=verdict.state, reason=verdict.reason, step=verdict.step)],
        )
        self._store.append_events(
            self._task_id,
            [
                EventDraft(
                    kind="exit",
                    job_id=verdict.job_id,
                    text=f"{verdict.state}: {verdict.reason}",
                    numbers={**verdict.evidence, "step": verdict.step},
                )
            ],
        )

    def decide(self, verdicts: Sequence[Verdict], curves: Mapping[str, Curve]) -> None:
        """Write decisions down before anything comes of them. One that an earlier run made stands there already."""
        new = [verdict for verdict in verdicts if verdict.job_id not in self._earlier.exits]
        self._decisions.add(
            [exit_entry(self._policy.name, v, curves[v.job_id].total_steps, curve=self._judged_source(v)) for v in new]
        )

    def _judged_source(self, verdict: Verdict) -> CurveSource | None:
        """Where the curve was read from that a verdict judged, if it judged one."""
        is_judged = verdict.state not in (JobState.FINISHED, JobState.FAILED, JobState.CANCELLED)
        return self._runs.curve_source(verdict.job_id) if is_judged else None

    def _states(self) -> dict[str, JobState]:
        return {record.job_id: record.state for record in self._store.jobs(self._task_id)}

    def _publish_decisions(self) -> None:
        self._runs.log_text(self._decisions.as_json(), ARTIFACT_NAME)

    def _asked_to_cancel(self, boundary: Boundary) -> dict[str, str]:
        """Why jobs are to end that a person has had enough of. One that had ended so before ends where it did then."""
        open_jobs = {*boundary.running, *boundary.waiting} - {*self._earlier.exits}
        reasons = self._cancel_requests.reasons()
        return {job_id: reason for job_id, reason in reasons.items() if job_id in open_jobs}

    def _record(self, boundary: Boundary, progress: Progress, also: Collection[str]) -> dict[str, Curve]:
        self._runs.log_steps(boundary.steps)
        self._runs.log_evaluations(boundary.evaluations)
        progress.note_steps(boundary, self._recorded)
        measured = [record.job_id for record in boundary.steps]
        failed = [failure.job_id for failure in boundary.failures]
        curves = self._runs.read_curves([*dict.fromkeys([*measured, *failed, *also])])
        progress.note_curves(boundary, [curve for job_id, curve in curves.items() if job_id not in self._recorded])
        return curves

    def _judge(self, boundary: Boundary, curves: dict[str, Curve]) -> list[Verdict]:
        """Who ends. What would end a job is judged again on its curve as MLflow gives it back."""
        ending = [verdict.job_id for verdict in self._verdicts(boundary.running, curves)]
        if not ending:
            return []
        curves |= self._runs.settled_curves(ending)
        return self._verdicts(ending, curves)

    def _verdicts(self, job_ids: Sequence[str], curves: Mapping[str, Curve]) -> list[Verdict]:
        verdicts = []
        for job_id, curve in curves.items():
            if job_id not in job_ids:
                continue
            if job_id in self._earlier.exits:
                decided = self._earlier.verdict_at(job_id, curve.last_step)
                verdicts += [decided] if decided else []
                continue
            verdict = self._policy.judge(curve)
            spent = bool(curve.train_steps) and curve.train_steps[-1] >= curve.total_steps
            if verdict is not None and not (spent and verdict.state is not JobState.DIVERGING):
                verdicts.append(verdict)
        return verdicts


def verdict_tags(policy: str, verdict: Verdict, total_steps: int, source: CurveSource | None) -> dict[str, str]:
    """A verdict as MLflow tags: who decided, when, and on which numbers. State and reason have tags of their own."""
    tags = {} if source is None else {"alto.curve": source.value}
    return tags | {
        "alto.policy": policy,
        "alto.exit_step": str(verdict.step),
        "alto.exit_fraction": f"{verdict.step / total_steps:.4f}",
        "alto.evidence": json.dumps(dict(verdict.evidence)),
    }


def outcome_of(curve: Curve, verdict: Verdict, gate_rank: int | None = None) -> JobOutcome:
    """What a job's curve and its last verdict say about it."""
    return JobOutcome(
        job_id=curve.job_id,
        state=verdict.state,
        reason=verdict.reason,
        step=verdict.step,
        total_steps=curve.total_steps,
        best_step=curve.best_val_step,
        best_val_loss=curve.best_val,
        gate_rank=gate_rank,
    )


def _names(ended: Sequence[Verdict]) -> str:
    return ", ".join(verdict.job_id for verdict in ended if verdict.state in DEATHS)


def _spent(boundary: Boundary, by_id: Mapping[str, JobRun], ended: Collection[str]) -> list[Verdict]:
    """The jobs that have come to the end of their budgets."""
    return [
        spent_verdict(evaluation.job_id, evaluation.step, evaluation.val_loss)
        for evaluation in boundary.evaluations
        if evaluation.step == by_id[evaluation.job_id].budget.total_steps and evaluation.job_id not in ended
    ]


def spent_verdict(job_id: str, step: int, val_loss: float) -> Verdict:
    """The end of a job that trained its whole budget."""
    return Verdict(
        job_id=job_id, state=JobState.FINISHED, step=step, reason="budget spent", evidence={"val_loss": val_loss}
    )


def _advance(
    session: Generator[Boundary, Sequence[Verdict | JobRun], None], answers: Sequence[Verdict | JobRun]
) -> Boundary | None:
    try:
        return session.send(answers)
    except StopIteration:
        return None


def _as_verdict(failure: JobFailure) -> Verdict:
    return Verdict(job_id=failure.job_id, state=JobState.FAILED, step=failure.step, reason=failure.reason, evidence={})
