"""What can be done with the jobs that a finished task ended early: explain, replay, audit, revive, clean.

One real task for the whole module, run by the core alone; its tests leave it as they found it but for the last ones.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from alto_core.config import parse_task
from alto_core.curve_files import read_recording
from alto_core.decision_log import ExitLogEntry, GateLogEntry
from alto_core.domain import GateDecision, JobState, Verdict
from alto_core.early_exit import Curve, NonePolicy
from alto_core.early_exit.detectors import make_verdict
from alto_core.lifecycle import running
from alto_core.parking import parked_jobs, thin_to_budget
from alto_core.preparation import create_task, plan_task
from alto_core.replay import replay_recording
from alto_core.selection import evaluate_task, score_jobs
from alto_core.settings import load_settings
from alto_core.store import Store
from alto_core.supervision import Supervisor
from alto_core.tracking import Tracker
from alto_core.training import decide_gate, train_until
from alto_core.workspace import Workspace
from flows.cli.app import app

pytestmark = [pytest.mark.slow]
Tune = Callable[..., Workspace]
REPOSITORY = Path(__file__).resolve().parents[2]
KILLED_REVIVAL = """
import os, signal, sys
from alto_core.reviving import revive_job
from alto_core.settings import load_settings
from alto_core.supervision import Supervisor
from alto_core.workspace import Workspace

record = Supervisor._record
def record_and_die(self, *args):
    record(self, *args)
    self._runs.flush()
    os.kill(os.getpid(), signal.SIGKILL)

Supervisor._record = record_and_die
revive_job(Workspace(sys.argv[1], load_settings()), sys.argv[2])
"""


def all_stages(workspace: Workspace) -> None:
    for fraction in workspace.gates:
        train_until(workspace, fraction, num_slots=8)
        decide_gate(workspace, fraction)
    train_until(workspace, 1.0, num_slots=8)
    evaluate_task(workspace, num_slots=8)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One `ALTO_HOME` for all tests of this module."""
    home = tmp_path_factory.mktemp("parked") / "alto"
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALTO_HOME", str(home))
        patch.setenv("ALTO_DEVICE", "cpu")
        patch.setenv("COLUMNS", "150")
        for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
            patch.delenv(name, raising=False)
        yield home


@pytest.fixture(scope="module")
def tune(home: Path, tiny_model: Path, tiny_rows: Path) -> Tune:
    """Runs a small task through its stages, without Prefect. Eight jobs, of which two diverge.

    `stages` takes the running task's workspace in place of the usual stages.
    """

    def run(*, stages: Callable[[Workspace], None] = all_stages, **sections: object) -> Workspace:
        content = {
            "name": "tiny",
            "model": {"name": str(tiny_model)},
            "data": {"source": str(tiny_rows), "validation": {"rows": 8}},
            "search_space": {"learning_rate": [1e-4, 1e-3, 1e-2, 1e30], "lora_rank": [2, 4], "adapter_batch_size": 4},
            "budget": {"steps": 20, "eval_interval_fraction": 0.05, "gate_warmup_fraction": 0.1},
            "evaluation": {"metric": "exact_match", "max_new_tokens": 6},
        }
        plan = plan_task(parse_task(content | sections))
        task_id = Store(load_settings()).new_task_id("tiny")
        create_task(plan, task_id, load_settings())
        with running(task_id) as workspace:
            stages(workspace)
        return Workspace.open(task_id)

    return run


@pytest.fixture(scope="module")
def workspace(tune: Tune) -> Workspace:
    return tune()


def alto(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == exit_code, result.output
    return result.stdout if exit_code == 0 else result.stderr


def underperforming(workspace: Workspace) -> str:
    return workspace.ended_as(JobState.UNDERPERFORMING)[0]


def test_every_exit_is_logged_with_its_numbers_in_mlflow_and_beside_the_task(workspace: Workspace) -> None:
    records = workspace.records()
    log = workspace.decisions.read()
    exits = {entry.job_id: entry for entry in log if isinstance(entry, ExitLogEntry)}
    assert {job_id: entry.state for job_id, entry in exits.items()} == {j: r.state for j, r in records.items()}
    assert [entry.fraction for entry in log if isinstance(entry, GateLogEntry)] == [0.1, 0.2, 0.4]
    client = MlflowClient(load_settings().mlflow_tracking_uri)
    runs = Tracker(load_settings()).task_runs(workspace.task_id)
    published = json.loads(Path(client.download_artifacts(runs.parent_run_id, "decisions.json")).read_text())
    assert len(published) == len(log)
    job_id = underperforming(workspace)
    tags = client.get_run(runs.job_run_ids[job_id]).data.tags
    assert tags["alto.policy"] == "guarded"
    assert tags["alto.exit_step"] == str(records[job_id].step)
    assert json.loads(tags["alto.evidence"]) == exits[job_id].evidence
    assert exits[job_id].evidence["gate_rank"] == records[job_id].gate_rank


def test_a_gate_exit_is_explained_with_its_neighbours(workspace: Workspace) -> None:
    job_id = underperforming(workspace)
    record = workspace.records()[job_id]
    content = json.loads(alto("explain", workspace.task_id, job_id, "--json"))
    assert (content["state"], content["reason"]) == ("underperforming", record.reason)
    places = {line["job_id"]: line for line in content["neighbours"]}
    assert places[job_id]["place"] == record.gate_rank
    assert places[job_id]["kept"] is False
    assert content["neighbours"][0]["place"] == 1
    text = alto("explain", workspace.task_id, job_id[:-2])
    for part in (record.reason.split(";")[0], "The numbers compared", "went on", "●", "100 % of the budget"):
        assert part in text, part


def test_a_divergence_and_a_finished_job_are_explained_too(workspace: Workspace) -> None:
    (diverged, *_) = workspace.ended_as(JobState.DIVERGING)
    text = alto("explain", workspace.task_id, diverged)
    assert workspace.records()[diverged].reason in text
    content = json.loads(alto("explain", workspace.task_id, workspace.result.winner or "", "--json"))
    assert (content["reason"], content["fraction"]) == ("budget spent", 1.0)


def test_an_unknown_or_ambiguous_job_is_refused_with_its_nearest(workspace: Workspace) -> None:
    assert "such as lr" in alto("explain", workspace.task_id, "nobody", exit_code=7)
    assert "the beginning of 8 ids" in alto("explain", workspace.task_id, "lr", exit_code=7)


def test_exported_curves_replay_to_the_verdicts_that_were_given(workspace: Workspace, tmp_path: Path) -> None:
    file = tmp_path / "curves.parquet"
    assert "8 jobs" in alto("curves", workspace.task_id, str(file))
    assert (tmp_path / "curves.rows.parquet").is_file()
    warmup = workspace.task.budget.gate_warmup_fraction
    summary = replay_recording(read_recording(file), workspace.policy, warmup_fraction=warmup)
    records = workspace.records()
    assert {job.job_id: (job.state, job.step) for job in summary.jobs} == {
        job_id: (record.state.value, record.step) for job_id, record in records.items()
    }
    reasons = {job.job_id: job.verdict.reason for job in summary.jobs if job.verdict}
    for job_id, reason in reasons.items():
        # a curve file has no NaN loss, it has infinity
        assert reason.replace(" inf ", " nan ") == records[job_id].reason.replace(" inf ", " nan ")
    assert summary.chosen_job == workspace.result.winner


def test_curves_need_a_parquet_name(workspace: Workspace, tmp_path: Path) -> None:
    assert "ends in .parquet" in alto("curves", workspace.task_id, str(tmp_path / "curves.csv"), exit_code=3)


@pytest.mark.usefixtures("prefect_server")
def test_an_audit_runs_a_sample_to_the_end_and_leaves_the_task_as_it_was(workspace: Workspace) -> None:
    before = workspace.records()
    states = {job.job_id: job.state_bytes for job in parked_jobs(workspace)}
    content = json.loads(alto("audit", workspace.task_id, "--share", "1", "--json").splitlines()[-1])
    sampled = {job["job_id"]: job for job in content["jobs"]}
    assert set(sampled) == {job_id for job_id, num_bytes in states.items() if num_bytes}
    winner_loss = before[workspace.result.winner or ""].best_val_loss
    for job in sampled.values():
        if job["exit_state"] == "underperforming":
            assert job["final_val_loss"] <= job["exit_val_loss"]
            assert job["metric_value"] is not None
    lowest = min([winner_loss, *(j["final_val_loss"] for j in sampled.values() if j["final_val_loss"] is not None)])
    assert content["regret"] == pytest.approx(winner_loss - lowest)
    assert content["false_exits"]["num_rows"] == len(sampled)
    assert {line["fraction"] for line in content["agreement"]} == {0.01, 0.02, 0.05, 0.1, 0.2}
    assert repr(workspace.records()) == repr(before), "by text: NaN is not equal to itself"
    assert {job.job_id: job.state_bytes for job in parked_jobs(workspace)} == states
    client = MlflowClient(load_settings().mlflow_tracking_uri)
    run_id = Tracker(load_settings()).task_runs(workspace.task_id).parent_run_id
    folder = Path(client.download_artifacts(run_id, "audit"))
    recorded = read_recording(folder / "curves.parquet")
    assert {job.job_id for job in recorded.jobs} == set(sampled)
    assert json.loads((folder / "report.json").read_text())["regret"] == pytest.approx(content["regret"])


def test_a_share_out_of_range_is_refused(workspace: Workspace) -> None:
    for share in ("0", "1.5"):
        assert "--share" in alto("audit", workspace.task_id, "--share", share, exit_code=2)


def test_a_revived_job_goes_on_as_if_it_had_never_stopped(workspace: Workspace, tune: Tune) -> None:
    job_id = underperforming(workspace)
    before = workspace.records()[job_id]
    content = json.loads(alto("revive", workspace.task_id, job_id, "--json"))
    after = workspace.records()[job_id]
    assert (content["state"], after.state, after.step) == ("finished", JobState.FINISHED, before.total_steps)
    assert workspace.result.score(job_id, "validation") is not None
    unbroken = tune(early_exit={"preset": "none"})
    runs = [Tracker(load_settings()).task_runs(w.task_id) for w in (workspace, unbroken)]
    revived, whole = (r.read_curves([job_id])[job_id] for r in runs)
    assert revived.train_steps == whole.train_steps == tuple(range(1, 21))
    assert revived.train_losses == pytest.approx(whole.train_losses, abs=1e-5)
    assert revived.val_losses == pytest.approx(whole.val_losses, abs=1e-5)
    client = MlflowClient(load_settings().mlflow_tracking_uri)
    run = client.get_run(runs[0].job_run_ids[job_id])
    assert (run.info.status, run.data.tags["alto.state"]) == ("FINISHED", "finished")
    states = [entry.state for entry in workspace.decisions.exits_of(job_id)]
    assert states == [JobState.UNDERPERFORMING, JobState.RUNNING, JobState.FINISHED]
    assert "expected a job that ended early" in alto("revive", workspace.task_id, job_id, exit_code=7)


def test_a_revived_job_that_never_had_a_finite_loss_is_not_scored(workspace: Workspace) -> None:
    """It diverges again, and has no adapter to hold against the winner's."""
    job_id = next(
        job.job_id for job in parked_jobs(workspace) if job.can_go_on and not (job.folder / "adapter").is_dir()
    )
    content = json.loads(alto("revive", workspace.task_id, job_id, "--json"))
    assert (content["state"], content["score"], content["beats_the_winner"]) == ("diverging", None, False)


def test_a_revival_that_was_interrupted_and_then_killed_can_be_made_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL as soon as the job is said to run; nothing of its curve is there twice afterwards."""
    job_id = underperforming(workspace)
    before = workspace.records()[job_id]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "_judge", interrupt)
        alto("revive", workspace.task_id, job_id, exit_code=130)
    after = workspace.records()[job_id]
    assert (after.state, after.step, after.reason) == (before.state, before.step, before.reason)

    command = [sys.executable, "-c", KILLED_REVIVAL, workspace.task_id, job_id]
    killed = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert workspace.records()[job_id].state is JobState.RUNNING

    assert json.loads(alto("revive", workspace.task_id, job_id, "--json"))["state"] == "finished"
    assert workspace.decisions.exits_of(job_id)[0].state is before.state
    assert workspace.decisions.exits_of(job_id)[-1].state is JobState.FINISHED
    run_id = Tracker(load_settings()).task_runs(workspace.task_id).job_run_ids[job_id]
    with closing(sqlite3.connect(load_settings().home / "mlflow.db")) as database:
        query = "SELECT key, step FROM metrics WHERE run_uuid = ? AND key IN ('train_loss', 'val_loss')"
        points = Counter(database.execute(query, [run_id]).fetchall())
    assert points and set(points.values()) == {1}


def test_states_beyond_the_disk_budget_are_thinned_to_the_adapter(tune: Tune) -> None:
    workspace = tune(early_exit={"parked_gib": 0})
    parked = parked_jobs(workspace)
    assert parked
    assert not any(job.can_go_on for job in parked)
    assert all((job.folder / "adapter").is_dir() for job in parked if job.record.best_val_loss is not None)
    assert any(event.kind == "parking" for event in workspace.store.events(workspace.task_id))
    assert "only its adapter was kept" in alto("revive", workspace.task_id, parked[0].job_id, exit_code=7)


def test_the_best_states_are_kept_within_the_budget(workspace: Workspace) -> None:
    parked = [job for job in parked_jobs(workspace) if job.can_go_on]
    budget = parked[0].state_bytes / 2**30
    copy = workspace.folder.with_name("copy")
    shutil.copytree(workspace.folder / "jobs", copy)
    task = workspace.task
    try:
        smaller = task.model_copy(update={"early_exit": task.early_exit.model_copy(update={"parked_gib": budget})})
        workspace.__dict__["task"] = smaller
        thinned = thin_to_budget(workspace)
        assert parked[0].job_id not in {job.job_id for job in thinned}
        assert {job.job_id for job in parked_jobs(workspace) if job.can_go_on} == {parked[0].job_id}
    finally:
        workspace.__dict__["task"] = task
        shutil.rmtree(workspace.folder / "jobs")
        copy.rename(workspace.folder / "jobs")


def test_the_best_parked_job_takes_the_slot_of_a_survivor_that_dies(tune: Tune) -> None:
    chosen: dict[str, str] = {}

    def stages(workspace: Workspace) -> None:
        train_until(workspace, 0.1, num_slots=8)
        decide_gate(workspace, 0.1)
        survivor, *_ = workspace.alive()
        shutil.rmtree(workspace.job_folder(survivor) / "state")  # as a disk that lost it
        parked = [job for job in parked_jobs(workspace) if job.record.state is JobState.UNDERPERFORMING]
        chosen.update(dead=survivor, best=parked[0].job_id, next=parked[1].job_id)
        train_until(workspace, 1.0, num_slots=8)

    workspace = tune(stages=stages, early_exit={"preset": "paper"})
    records = workspace.records()
    assert records[chosen["dead"]].state is JobState.FAILED
    assert "expected a whole state" in records[chosen["dead"]].reason
    assert (records[chosen["best"]].state, records[chosen["best"]].step) == (JobState.FINISHED, 20)
    assert records[chosen["next"]].state is JobState.UNDERPERFORMING
    entries = workspace.decisions.exits_of(chosen["best"])
    assert [entry.state for entry in entries] == [JobState.UNDERPERFORMING, JobState.RUNNING, JobState.FINISHED]
    assert chosen["dead"] in entries[1].reason
    curve = Tracker(load_settings()).task_runs(workspace.task_id).read_curves([chosen["best"]])[chosen["best"]]
    assert curve.train_steps == tuple(range(1, 21))


def test_a_job_that_a_gate_had_ended_when_its_task_failed_is_not_taken_for_cancelled(
    tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate is in the log, and the first end of it not yet recorded."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    def until_the_gate(workspace: Workspace) -> None:
        train_until(workspace, 0.1, num_slots=8)
        with monkeypatch.context() as patch:
            patch.setattr(Supervisor, "end", fail)
            decide_gate(workspace, 0.1)

    with pytest.raises(RuntimeError, match="boom"):
        tune(stages=until_the_gate)
    task_id = max(Store(load_settings()).tasks(), key=lambda record: record.created_at).task_id
    with running(task_id) as workspace:
        all_stages(workspace)
    logged = {job_id: entry.state for job_id, entry in workspace.decisions.last_exits().items()}
    assert logged == {job_id: record.state for job_id, record in workspace.records().items()}
    assert JobState.UNDERPERFORMING in logged.values()


@dataclass(frozen=True)
class FirstWorseEnds:
    """Ends a job as overfitting at its first evaluation that is worse than its best."""

    name: str = "first worse"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        return ()

    def judge(self, curve: Curve) -> Verdict | None:
        if curve.last_val is None or curve.best_val is None or curve.last_val <= curve.best_val:
            return None
        return make_verdict(curve, JobState.OVERFITTING, "worse than its best", {})

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        raise AssertionError("nothing here comes to a gate")


def test_a_job_stopped_past_its_best_leaves_its_best_adapter(tune: Tune) -> None:
    """What was exported measures the best validation loss again, not that of the last step."""

    def stages(workspace: Workspace) -> None:
        workspace.__dict__["policy"] = FirstWorseEnds()
        train_until(workspace, 1.0, num_slots=8)

    space = {"learning_rate": [3e-2, 1e-1], "lora_rank": [4], "adapter_batch_size": 4}
    workspace = tune(stages=stages, search_space=space)
    stopped = workspace.ended_as(JobState.OVERFITTING)
    assert stopped
    scores = score_jobs(workspace, workspace.data.validation, stopped, num_slots=2)
    for score in scores:
        record = workspace.records()[score.job_id or ""]
        assert record.best_step is not None
        assert record.best_step < record.step
        assert score.loss == pytest.approx(record.best_val_loss, abs=1e-5)
        assert record.val_loss is not None
        assert score.loss < record.val_loss


@dataclass(frozen=True)
class AllClimb:
    """Ends every job as diverging after 60 % of its budget."""

    name: str = "all climb"

    def rungs(self, warmup_fraction: float) -> tuple[float, ...]:
        return ()

    def judge(self, curve: Curve) -> Verdict | None:
        climbs = curve.last_step >= curve.step_at(0.6)
        return NonePolicy().judge(curve) or (make_verdict(curve, JobState.DIVERGING, "climbs", {}) if climbs else None)

    def gate(self, curves: Sequence[Curve], fraction: float) -> GateDecision:
        return NonePolicy().gate(curves, fraction)


def test_of_jobs_that_all_diverged_the_best_that_passed_the_gate_with_its_adapter_wins(tune: Tune) -> None:
    def stages(workspace: Workspace) -> None:
        workspace.__dict__["policy"] = AllClimb()
        train_until(workspace, 0.1, num_slots=8)
        decide_gate(workspace, 0.1)
        train_until(workspace, 1.0, num_slots=8)
        best = min(workspace.records().values(), key=lambda record: record.best_val_loss or math.inf)
        shutil.rmtree(workspace.job_folder(best.job_id) / "adapter")  # as a disk that lost it
        evaluate_task(workspace, num_slots=8)

    space = {"learning_rate": [1e-4, 1e-3, 1e-2, 1e30], "lora_rank": [4], "adapter_batch_size": 4}
    workspace = tune(stages=stages, search_space=space)
    assert {record.state for record in workspace.records().values()} == {JobState.DIVERGING}
    assert (workspace.result.winner or "").startswith("lr0.001-")
    assert len([score for score in workspace.result.scores if score.split == "validation"]) == 2
    assert "diverging, winner" in alto("status", workspace.task_id)
    # it ended early, but is no job that one could wonder about
    assert "is the winner" in alto("revive", workspace.task_id, workspace.result.winner or "", exit_code=7)
    audited = json.loads(alto("audit", workspace.task_id, "--share", "1", "--json").splitlines()[-1])
    assert workspace.result.winner not in {job["job_id"] for job in audited["jobs"]}
    assert audited["num_exited"] == 3


def test_clean_lists_and_frees_the_states_of_ended_tasks(workspace: Workspace) -> None:
    listed = [json.loads(line) for line in alto("clean", workspace.task_id, "--json").splitlines()]
    assert {line["job_id"] for line in listed} >= {job.job_id for job in parked_jobs(workspace) if job.can_go_on}
    assert not any(line["freed"] for line in listed)
    alto("clean", workspace.task_id, "--free")
    assert any(job.can_go_on for job in parked_jobs(workspace)), "states of today are younger than 14 days"
    alto("clean", workspace.task_id, "--older-than", "0", "--free")
    assert not any(job.can_go_on for job in parked_jobs(workspace))
    assert (workspace.job_folder(workspace.result.winner or "") / "adapter").is_dir()
    assert "No ended task" in alto("clean", workspace.task_id)
