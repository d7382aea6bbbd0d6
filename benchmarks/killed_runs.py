"""Runs of one task in processes that are killed; what comes out of them, for comparison."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

TASK_ID = "faults-1"
LIMIT_SECONDS = 600


class Runs:
    """Runs of one task, each in a home and a process of its own, forked from this one, which has loaded libraries."""

    def __init__(self, folder: Path, task_file: Path, *, core: bool):
        self._folder, self._task_file, self._core = folder, task_file, core
        self._seconds: dict[str, float] = {}
        template = folder / "first"
        template.mkdir(exist_ok=True)
        import flows.resume  # noqa: F401
        from alto_core.settings import load_settings
        from alto_core.tracking import Tracker

        Tracker(load_settings())  # makes MLflow's tables, which takes seconds
        with closing(sqlite3.connect(template / "mlflow.db")) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def unbroken(self, name: str) -> dict[str, Any]:
        """Run the task to its end; notes how long each stage takes."""
        self._make_home(name)
        status = _wait(self._start(name, "tune"))
        moments = self._stages(name)
        for stage, (begun, ended) in moments.items():
            self._seconds[stage] = ended - begun
        return self.outcome(name, status)

    def killed(
        self, name: str, stages: Sequence[str], draw: random.Random
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Run the task, kill it in each of these stages at a moment drawn over the stage's time, resume it each time.

        Returns:
            The kills; one that came too late, for what was left of its stage, is not among them. And the outcome.
        """
        self._make_home(name)
        kills, child = [], self._start(name, "tune")
        for stage in stages:
            last_event = self._last_event(name) if kills else 0
            delay = draw.random() * self._seconds[stage]
            reached = _wait_until(child, partial(self._is_in, name, stage, last_event))
            if reached:
                time.sleep(delay)
                os.kill(child, signal.SIGKILL)
            status = _wait(child)
            if status != -signal.SIGKILL:
                return kills, self.outcome(name, status)
            kills.append({"stage": self._last_stage(name), "delay_seconds": f"{delay:.2f}", **self._progress(name)})
            if self._is_over(name):
                return kills, self.outcome(name, 0)  # killed while it exited: `alto resume` would refuse
            child = self._start(name, "resume")
        return kills, self.outcome(name, _wait(child))

    def outcome(self, name: str, status: int) -> dict[str, Any]:
        """All that must be equal."""
        home = self._folder / name
        found: dict[str, Any] = {"exit status": status}
        jobs = "SELECT job_id, state, reason, step, best_step, best_val_loss, gate_rank FROM alto_job ORDER BY position"
        found |= {f"job {row[0]}": row[1:] for row in self._query(name, "store.db", jobs)}
        ((winner, result),) = self._query(name, "store.db", "SELECT winner_job_id, result FROM alto_task")
        result = json.loads(result or "{}")
        found |= {
            key: result.get(key) for key in ("winner", "scores", "comparisons", "check_losses", "samples", "gates")
        }
        runs = "SELECT run_uuid, status FROM runs ORDER BY name"
        for run_id, run_status in self._query(name, "mlflow.db", runs):
            tags = dict(self._query(name, "mlflow.db", "SELECT key, value FROM tags WHERE run_uuid = ?", run_id))
            job_id = tags.get("alto.job_id", "the task")
            assert f"run of {job_id}" not in found, f"two runs of {job_id}"
            told = {key: tags.get(key) for key in ("alto.state", "alto.reason", "alto.gate_rank", "alto.evidence")}
            found[f"run of {job_id}"] = (run_status, told)
            points = "SELECT key, step, value, is_nan FROM metrics WHERE run_uuid = ? ORDER BY key, step, timestamp"
            kept = [p for p in self._query(name, "mlflow.db", points, run_id) if _is_reproducible(p[0])]
            found[f"points of {job_id}"] = kept
            assert len({point[:2] for point in kept}) == len(kept), f"{name}: points of {job_id} stand there twice"
        found["versions"] = self._query(name, "mlflow.db", "SELECT name, version FROM model_versions")
        models = "SELECT name, status FROM logged_models WHERE lifecycle_stage = 'active'"
        found["logged models"] = self._query(name, "mlflow.db", models)
        log = home / "tasks" / TASK_ID / "decisions.jsonl"
        entries = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
        # where a curve was read from depends on how fast MLflow was
        found["decisions"] = [{key: value for key, value in entry.items() if key != "curve"} for entry in entries]
        adapter = home / "tasks" / TASK_ID / "jobs" / str(winner) / "adapter" / "adapter_model.safetensors"
        found["adapter"] = hashlib.sha256(adapter.read_bytes()).hexdigest() if adapter.is_file() else None
        events = "SELECT job_id, numbers FROM alto_event WHERE kind = 'evaluation' ORDER BY job_id, event_id"
        found["evaluations"] = self._query(name, "store.db", events)
        return found

    def _start(self, name: str, command: str) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        try:
            os.environ["ALTO_HOME"] = str(self._folder / name)
            log = os.open(self._folder / name / "log.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            (self._run_core if self._core else self._run_command)(command)
        except SystemExit as done:
            os._exit(int(done.code or 0))
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(99)
        os._exit(0)

    def _run_command(self, command: str) -> None:
        from flows.cli.app import main

        sys.argv = ["alto", command, str(self._task_file) if command == "tune" else TASK_ID, "--plain"]
        main()

    def _run_core(self, command: str) -> None:
        """The stages without Prefect around them."""
        from alto_core.config import load_task
        from alto_core.domain import Stage
        from alto_core.inputs import refuse_changes
        from alto_core.lifecycle import running
        from alto_core.preflight import profile_task
        from alto_core.preparation import create_task, plan_task
        from alto_core.registration import publish_report, register_winner
        from alto_core.selection import evaluate_task
        from alto_core.settings import load_settings
        from alto_core.training import decide_gate, is_decided, train_until

        settings = load_settings()
        if command == "tune":
            create_task(plan_task(load_task(self._task_file)), TASK_ID, settings, task_file=self._task_file)
        else:
            refuse_changes(settings.task_folder(TASK_ID))
        with running(TASK_ID) as workspace:
            workspace.begin(Stage.PROFILE)
            slots = profile_task(workspace)[0].num_slots
            workspace.begin(Stage.WARMUP)
            warmup = workspace.task.budget.gate_warmup_fraction
            train_until(workspace, warmup, num_slots=slots)
            workspace.begin(Stage.GATE)
            decide_gate(workspace, warmup)
            workspace.begin(Stage.CONTINUE)
            for rung in workspace.gates[1:]:
                if is_decided(workspace, rung) or len(workspace.alive()) > 1:
                    train_until(workspace, rung, num_slots=slots)
                    decide_gate(workspace, rung)
            train_until(workspace, 1.0, num_slots=slots)
            workspace.begin(Stage.EVALUATE)
            winner, _ = evaluate_task(workspace, num_slots=slots)
            workspace.begin(Stage.REGISTER)
            register_winner(workspace, winner)
        publish_report(workspace)

    def _make_home(self, name: str) -> None:
        home = self._folder / name
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        shutil.copy(self._folder / "first" / "mlflow.db", home)

    def _query(self, name: str, database: str, query: str, *values: str) -> list[tuple[Any, ...]]:
        with closing(
            sqlite3.connect(f"file:{self._folder / name / database}?mode=ro", uri=True, timeout=30)
        ) as connection:
            return connection.execute(query, values).fetchall()

    def _stages(self, name: str) -> dict[str, tuple[float, float]]:
        """Begin and end, in seconds, of the stages so far."""
        from datetime import datetime

        events = self._query(name, "store.db", "SELECT kind, text, at FROM alto_event ORDER BY event_id")
        times = [(kind, text, datetime.fromisoformat(at).timestamp()) for kind, text, at in events]
        begun = [(text, at) for kind, text, at in times if kind == "stage"]
        ends = [at for _, at in begun[1:]] + [max((at for *_, at in times), default=0.0)]
        return {stage: (at, end) for (stage, at), end in zip(begun, ends, strict=False)}

    def _is_over(self, name: str) -> bool:
        query = "SELECT COUNT(*) FROM alto_task WHERE state = 'finished' AND report_path IS NOT NULL"
        return bool(self._query(name, "store.db", query)[0][0])

    def _last_event(self, name: str) -> int:
        return int(self._query(name, "store.db", "SELECT MAX(event_id) FROM alto_event")[0][0] or 0)

    def _is_in(self, name: str, stage: str, after_event: int) -> bool:
        """Whether a stage has begun since an event."""
        query = f"SELECT COUNT(*) FROM alto_event WHERE kind = 'stage' AND text = ? AND event_id > {after_event}"
        try:
            return bool(self._query(name, "store.db", query, stage)[0][0])
        except sqlite3.Error:
            return False  # not made yet

    def _last_stage(self, name: str) -> str:
        return str(self._query(name, "store.db", "SELECT stage FROM alto_task")[0][0])

    def _progress(self, name: str) -> dict[str, Any]:
        """Steps that the store knows of, and how many of them lie behind the newest cut."""
        steps = dict(self._query(name, "store.db", "SELECT job_id, step FROM alto_job"))
        cuts = sorted((self._folder / name / "tasks" / TASK_ID / "cuts").glob("cut-*.json"))
        places = json.loads(json.loads(cuts[-1].read_text())["cut"])["places"] if cuts else []
        lost = sum(max(0, steps[place["job_id"]] - place["step"]) for place in places)
        made = int(cuts[-1].stem.removeprefix("cut-")) if cuts else 0
        return {"steps_at_kill": sum(steps.values()), "steps_lost": lost, "cuts_at_kill": made}


def _is_reproducible(metric: str) -> bool:
    """Speed and the use of the machine differ from run to run."""
    return not metric.startswith("system/") and metric != "tokens_per_second"


def _wait(child: int) -> int:
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    raise TimeoutError(f"a run has not ended after {LIMIT_SECONDS} s")


def _wait_until(child: int, is_so: Callable[[], bool]) -> bool:
    """Whether it became so while the child lived."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline and Path(f"/proc/{child}/exe").exists():
        if is_so():
            return True
        time.sleep(0.01)
    return False
