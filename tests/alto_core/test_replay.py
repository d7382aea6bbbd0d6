"""A recorded sweep in numbers: samples saved, regret, coverage; over files, policies and settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from alto_core.curve_files import CurveRows, RecordedJob, Recording, write_recording
from alto_core.domain import RowLosses
from alto_core.early_exit import Curve, make_policy
from alto_core.early_exit.audit import rank_agreement, spearman, top_quarter
from alto_core.replay import ReplaySummary, replay_grid, replay_recording
from flows.cli.app import app

ROWS = 4


def make_job(
    job_id: str, losses: dict[int, float], *, total: int = 100, batch: int = 1, lr: float = 1e-3
) -> RecordedJob:
    """Validation losses by step, each of four equal rows; train loss lies just below."""
    steps = tuple(sorted(losses))
    curve = Curve(
        job_id=job_id,
        learning_rate=1e-3,
        total_steps=total,
        warmup_steps=1,
        train_steps=steps,
        train_losses=tuple(0.99 * losses[step] for step in steps),
        val_steps=steps,
        val_losses=tuple(losses[step] for step in steps),
        row_losses={s: RowLosses(loss_sums=(losses[s],) * ROWS, num_labels=(1,) * ROWS) for s in steps},
    )
    return RecordedJob(curve=curve, lora_rank=8, adapter_batch_size=batch, total_steps=total)


def falling(end: float, *, total: int = 100) -> dict[int, float]:
    return {step: end + math.exp(-10 * step / total) for step in range(1, total + 1)}


@pytest.fixture
def recording() -> Recording:
    """Eight jobs that end at 1.0, 1.1, ...; as many rows whatever their batch size."""
    jobs = [
        make_job(
            f"job{i}",
            falling(1 + i / 10, total=100 if i % 2 else 50),
            total=100 if i % 2 else 50,
            batch=1 + (i + 1) % 2,
        )
        for i in range(8)
    ]
    return Recording(path=Path("made.parquet"), jobs=tuple(jobs))


def replayed(recording: Recording, preset: str, **constants: float) -> ReplaySummary:
    return replay_recording(recording, make_policy(preset, constants), warmup_fraction=0.1)


def test_saved_rows_are_counted_by_hand(recording: Recording) -> None:
    """A quarter of eight trains on, six stop at a tenth of their 100 rows: 540 of 800 are saved."""
    summary = replayed(recording, "paper")
    assert (summary.samples_planned, summary.samples_trained) == (800, 260)
    assert summary.saved_by == pytest.approx({"underperforming": 0.675, "overfitting": 0.0, "diverging": 0.0})
    assert summary.samples_saved_share == pytest.approx(0.675)
    assert [job.state for job in summary.jobs].count("finished") == 2


def test_no_regret_where_the_best_was_kept(recording: Recording) -> None:
    summary = replayed(recording, "paper")
    assert (summary.best_job, summary.chosen_job, summary.regret) == ("job0", "job0", 0.0)
    assert summary.best_kept
    assert summary.within_noise
    assert summary.val_loss_ratio == 1.0
    assert summary.top_quarter_coverage == 1.0


def test_a_late_overtaker_is_the_regret_of_a_policy_that_ends_it(recording: Recording) -> None:
    late = make_job("late", {step: 3.0 if step <= 30 else 0.5 for step in range(1, 101)})
    summary = replayed(Recording(path=recording.path, jobs=(*recording.jobs, late)), "paper")
    assert (summary.best_job, summary.best_val_loss, summary.chosen_job) == ("late", 0.5, "job0")
    assert summary.regret == pytest.approx(0.5 + math.exp(-10))
    assert summary.regret_standard_error == pytest.approx(0.0)
    assert not summary.best_kept
    assert not summary.within_noise
    assert summary.val_loss_ratio == pytest.approx((1 + math.exp(-10)) / 0.5)


def test_a_regret_below_its_standard_error_is_within_noise(recording: Recording) -> None:
    """The late job is better by 0.01 on average: worse on half of the rows, better on the others."""
    late = make_job("late", {step: 3.0 if step <= 30 else 0.99 for step in range(1, 101)})
    noisy = {s: RowLosses(loss_sums=(0.5, 1.48, 0.5, 1.48), num_labels=(1,) * ROWS) for s in late.curve.val_steps[30:]}
    late.curve.row_losses.update(noisy)  # type: ignore[attr-defined]
    summary = replayed(Recording(path=recording.path, jobs=(*recording.jobs, late)), "paper")
    assert summary.best_job == "late"
    assert 0 < summary.regret < summary.regret_standard_error
    assert summary.within_noise


def test_nothing_is_chosen_where_every_job_is_ended() -> None:
    jobs = tuple(make_job(f"job{i}", {1: math.inf, 2: math.inf}, total=2) for i in range(3))
    summary = replayed(Recording(path=Path("x"), jobs=jobs), "guarded")
    assert (summary.chosen_job, summary.best_job, summary.regret, summary.within_noise) == (None, None, None, False)


def test_an_unfinished_recording_of_a_survivor_may_win_and_saves_nothing(recording: Recording) -> None:
    cut = make_job("cut", dict.fromkeys(range(1, 61), 0.9))
    summary = replayed(Recording(path=recording.path, jobs=(*recording.jobs, cut)), "paper")
    job = next(job for job in summary.jobs if job.job_id == "cut")
    assert (job.state, job.fraction, job.samples) == ("unfinished", 0.6, 60)
    assert summary.chosen_job == "cut"


@pytest.mark.parametrize(("climbs_from", "chosen"), [(60, "dives"), (3, "job0")])
def test_what_diverged_after_the_gate_may_win_with_its_best_adapter(
    recording: Recording, climbs_from: int, chosen: str
) -> None:
    """One that climbs before the gate was hardly trained, whatever its loss: nothing else ranks it."""
    losses = {step: 0.8 if step < climbs_from else 0.8 * 2.0 ** (step - climbs_from + 1) for step in range(1, 101)}
    summary = replayed(Recording(path=recording.path, jobs=(*recording.jobs, make_job("dives", losses))), "guarded")
    assert next(job for job in summary.jobs if job.job_id == "dives").state == "diverging"
    assert summary.chosen_job == chosen


def test_a_grid_is_every_combination(recording: Recording) -> None:
    grid = {"select_ratio": [0.25, 0.5], "gate_warmup_fraction": [0.1, 0.5]}
    summaries = list(replay_grid(recording, ["paper", "guarded"], grid))
    assert len(summaries) == 8
    saved = {(s.policy, *s.settings.values()): s.samples_saved_share for s in summaries}
    assert saved["paper", 0.25, 0.1] > saved["paper", 0.5, 0.1] > saved["paper", 0.5, 0.5]


def test_spearman_by_hand_with_ties_and_without_any_difference() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)
    assert spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    assert math.isnan(spearman([1, 1], [1, 2]))
    assert math.isnan(spearman([1], [1]))


def test_rank_agreement_leaves_out_what_is_no_number(recording: Recording) -> None:
    wild = make_job("wild", dict.fromkeys(range(1, 101), math.inf)).curve
    agreement = rank_agreement([*recording.curves, wild], 0.05)
    assert agreement.num_jobs == 8
    assert agreement.spearman == pytest.approx(1.0)
    assert agreement.top_quarter_coverage == 1.0
    assert agreement.keeps_best
    assert top_quarter([*recording.curves, wild]) == ("job0", "job1")
    assert rank_agreement([], 0.05).num_jobs == 0


@pytest.fixture
def file(recording: Recording, tmp_path: Path) -> Path:
    path = tmp_path / "sweep.parquet"
    rows = [CurveRows(curve=j.curve, lora_rank=8, adapter_batch_size=j.adapter_batch_size) for j in recording.jobs]
    write_recording(path, rows)
    return path


Alto = Callable[..., Any]


@pytest.fixture
def alto(monkeypatch: pytest.MonkeyPatch) -> Alto:
    monkeypatch.setenv("COLUMNS", "150")
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_alto_replay_tells_the_same_as_json(recording: Recording, file: Path, alto: Alto) -> None:
    result = alto("replay", str(file), "--policy", "paper", "--set", "gate_warmup_fraction=0.1", "--json")
    assert result.exit_code == 0, result.output
    (content,) = [json.loads(line) for line in result.stdout.splitlines()]
    summary = replayed(recording, "paper")
    assert (content["event"], content["policy"], content["num_jobs"]) == ("replay", "paper", 8)
    assert content["samples_saved_share"] == pytest.approx(summary.samples_saved_share)
    assert (content["best_job"], content["chosen_job"], content["regret"]) == ("job0", "job0", 0.0)
    assert {v["job_id"]: (v["state"], v["step"]) for v in content["verdicts"]} == {
        job.job_id: (job.state, job.step) for job in summary.jobs
    }
    assert all(v["reason"] for v in content["verdicts"])
    assert [gate["fraction"] for gate in content["gates"]] == [0.1]
    assert [line["fraction"] for line in content["early_ranking"]] == [0.01, 0.02, 0.05, 0.1, 0.2]


def test_alto_replay_shows_jobs_or_a_grid(file: Path, alto: Alto) -> None:
    one = alto("replay", str(file)).stdout
    for text in ("guarded on", "training rows saved", "job7", "underperforming", "Spearman"):
        assert text in one, text
    many = alto("replay", str(file), "--policy", "asha", "--policy", "paper", "--set", "gate_warmup_fraction=0.05,0.1")
    lines = many.stdout.splitlines()
    assert len(lines) == 5
    assert "gate_warmup_fraction" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--policy", "hyperband"], "--policy: got 'hyperband', expected one of guarded, paper, asha"),
        (["--set", "select_ratio"], "--set: got 'select_ratio', expected NAME=VALUE"),
        (["--set", "select_ratio=x"], "a number, not 'x'"),
        (["--set", "select_ratio=2"], "select_ratio: got 2, expected a number in (0, 1]"),
        (["--set", "no_such=2"], "no_such: got an unknown constant"),
        (["--set", "gate_warmup_fraction=1"], "gate_warmup_fraction: got 1, expected a share in (0, 1)"),
    ],
)
def test_wrong_options_are_refused_by_name(file: Path, alto: Alto, arguments: list[str], text: str) -> None:
    result = alto("replay", str(file), *arguments)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_missing_file_has_exit_code_3(alto: Alto, tmp_path: Path) -> None:
    result = alto("replay", str(tmp_path / "none.parquet"), "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["kind"] == "DataError"
