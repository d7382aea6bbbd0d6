"""A made-up task with one job of every fate, as the values that a report is made from."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from alto_core.domain import GateEntry, JobState, LoraJob, TaskState
from alto_core.early_exit.curves import Curve
from alto_core.outcomes import AnswerSample, Comparison, Interval, Score
from alto_core.report import JobRow, ReportData, StageTime, TaskFacts
from alto_core.report.values import ExitTime, LogLine
from alto_core.result import GateRecord, RegisteredVersion, TaskResult

TOTAL_STEPS, WARMUP_STEPS = 40, 4
FATES = (
    (1e-3, JobState.FINISHED, 40, "budget spent"),
    (2e-3, JobState.FINISHED, 40, "budget spent"),
    (3e-3, JobState.OVERFITTING, 24, "the gap 0.34 is above 0.1"),
    (1e-4, JobState.UNDERPERFORMING, 4, "place 4 of 5 at the gate"),
    (1e-5, JobState.UNDERPERFORMING, 4, "place 5 of 5 at the gate"),
    (2e-2, JobState.DIVERGING, 3, "train and validation loss rose twice"),
    (3e-2, JobState.DIVERGING, 2, "the train loss is nan"),
    (4e-3, JobState.FAILED, 9, "<script>alert('reason')</script>"),
    (5e-3, JobState.CANCELLED, 11, "cancelled"),
)


def _job(learning_rate: float) -> LoraJob:
    return LoraJob(
        learning_rate=learning_rate,
        lora_rank=8,
        lora_alpha=16,
        adapter_batch_size=8,
        target_modules=("q_proj",),
    )


def _curve(job: LoraJob, state: JobState, last_step: int) -> Curve:
    train = [
        2.5 * math.exp(-step / 12) + 0.3 + 100 * (job.learning_rate - 2e-3) ** 2 for step in range(1, last_step + 1)
    ]
    val_steps = tuple(range(1, last_step + 1)) if last_step < 5 else tuple(range(2, last_step + 1, 2))
    val = [1.05 * train[step - 1] for step in val_steps]
    if state is JobState.DIVERGING:
        train[-1] = val[-1] = math.nan if job.learning_rate == 3e-2 else 40.0
    return Curve(
        job_id=job.job_id,
        learning_rate=job.learning_rate,
        total_steps=TOTAL_STEPS,
        warmup_steps=WARMUP_STEPS,
        train_steps=tuple(range(1, last_step + 1)),
        train_losses=tuple(train),
        val_steps=val_steps,
        val_losses=tuple(val),
    )


def _row(job: LoraJob, state: JobState, step: int, reason: str, curve: Curve) -> JobRow:
    best = curve.best_val_step
    return JobRow(
        job=job,
        state=state,
        total_steps=TOTAL_STEPS,
        warmup_steps=WARMUP_STEPS,
        step=step,
        reason=reason,
        train_loss=curve.train_losses[-1],
        val_loss=curve.val_losses[-1],
        best_val_loss=None if best is None else curve.val_losses[curve.val_steps.index(best)],
        best_step=best,
    )


def _scores(winner: str) -> tuple[Score, ...]:
    def score(job_id: str | None, split: str, loss: float, share: float, low: float, high: float) -> Score:
        interval = Interval(value=share, low=low, high=high, num_rows=240)
        return Score(
            job_id=job_id,
            split=split,
            loss=loss,
            loss_standard_error=0.01,
            metric="exact_match",
            metric_value=interval,
        )

    return (
        score(winner, "validation", 0.4, 0.9, 0.85, 0.93),
        score(winner, "test", 0.41, 0.925, 0.885, 0.952),
        score(None, "test", 2.9, 0.0, 0.0, 0.016),
    )


def _comparisons(winner: str, second: str) -> tuple[Comparison, ...]:
    def comparison(other_id: str | None, split: str, quantity: str, value: float) -> Comparison:
        difference = Interval(value=value, low=value - 0.01, high=value + 0.01, num_rows=240)
        return Comparison(job_id=winner, other_id=other_id, split=split, quantity=quantity, difference=difference)

    return (
        comparison(second, "validation", "loss", -0.02),
        comparison(None, "test", "loss", -2.49),
        comparison(None, "test", "exact_match", 0.925),
    )


def make_report(num_copies: int = 1) -> ReportData:
    """One job of every fate, times `num_copies` with slightly different learning rates."""
    rows, curves = [], {}
    for copy in range(num_copies):
        for rate, state, step, reason in FATES:
            job = _job(rate * (1 + copy / 1000))
            curves[job.job_id] = _curve(_job(rate), state, step)
            rows.append(_row(job, state, step, reason, curves[job.job_id]))
    winner = rows[1].job_id
    early = (JobState.DIVERGING,)
    ranked = sorted((row for row in rows if row.state not in early), key=lambda row: row.best_val_loss or 0)
    entries = [
        GateEntry(
            job_id=row.job_id,
            gate_rank=place,
            val_loss=row.best_val_loss,
            kept=row.state is not JobState.UNDERPERFORMING,
            reason="rank" if row.state is JobState.UNDERPERFORMING else "top",
        )
        for place, row in enumerate(ranked, start=1)
    ]
    entries += [
        GateEntry(job_id=row.job_id, gate_rank=None, val_loss=None, kept=False, reason=str(row.state))
        for row in rows
        if row.state in early
    ]
    started = datetime(2026, 5, 1, 12, tzinfo=UTC)
    return ReportData(
        facts=TaskFacts(
            task_id="made-1",
            name="made",
            owner="me",
            state=TaskState.FINISHED,
            model="tiny",
            data="train.jsonl",
            metric="exact_match",
            task_file="name: made\nmodel: {name: tiny}\n",
            started=started,
            ended=started + timedelta(seconds=318),
        ),
        jobs=tuple(rows),
        curves=curves,
        result=TaskResult(
            winner=winner,
            scores=_scores(winner),
            comparisons=_comparisons(winner, rows[0].job_id),
            samples=(
                AnswerSample(
                    split="test", prompt="Reverse: one two", reference="two one", winner="two one", untuned="<b>one</b>"
                ),
            ),
            gates=(GateRecord(fraction=0.1, entries=tuple(entries)),),
            num_train_rows=320,
            seconds=318,
            tracking_share=0.0121,
            peak_bytes=3 << 30,
            adapter_folder="jobs/winner/adapter",
            registered=RegisteredVersion(name="made", version=1, aliases=("champion",)),
        ),
        stages=tuple(
            StageTime(stage=name, seconds=at)
            for name, at in (("profile", 3), ("warmup", 20), ("gate", 85), ("evaluate", 200))
        ),
        log=(LogLine(seconds=86, kind="gate", job_id=None, text="6 go on"),),
        exits=tuple(ExitTime(job_id=row.job_id, seconds=60 + 5 * row.step) for row in rows),
        tokens_per_second=187.0,
        data_table="split  rows\ntrain   320",
    )


@pytest.fixture
def report_data() -> ReportData:
    return make_report()


@pytest.fixture
def report_maker() -> Callable[[int], ReportData]:
    return make_report
