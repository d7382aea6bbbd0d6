"""What the tracking benchmarks share: MLflow on SQLite or PostgreSQL, made-up jobs, and a count of what arrived.

Every number that is logged follows from job and step, so that what MLflow holds can be compared point by point.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from alto_core.config import TuningTask, parse_task
from alto_core.domain import Evaluation, LoraJob, RowLosses, StepRecord
from alto_core.settings import Settings, load_settings, prepare_environment
from alto_core.tracking import DatasetSummary, TaskRuns, Tracker

TASK_ID = "load-1"
NUM_ROWS = 128
"""Validation rows."""


@dataclass(frozen=True, kw_only=True)
class Arrived:
    """What MLflow holds of the jobs' runs, against what was logged."""

    expected: int
    lost: int
    doubled: int
    wrong: int
    """Points of the train loss with another value than the one that was logged."""


class MlflowServer:
    """A server on loopback that can be killed and started again on its port."""

    def __init__(self, folder: Path, database_url: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._folder, self._database_url = folder, database_url
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Return when it answers."""
        command = [sys.executable, "-W", "ignore", "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1"]
        command += ["--port", str(self.port), "--backend-store-uri", self._database_url]
        command += ["--artifacts-destination", str(self._folder / "artifacts"), "--uvicorn-opts", "--no-access-log"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            if self._process.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit(f"no MLflow server: see {self._folder / 'server.log'}")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def mlflow(kind: str, folder: Path | None = None) -> Iterator[tuple[Settings, str, MlflowServer | None]]:
    """A fresh workspace on `sqlite`, or on a server with a `postgresql` database: settings, database URL, server.

    Args:
        kind: the store.
        folder: where to make the workspace; the temporary folder by default.
    """
    with tempfile.TemporaryDirectory(prefix="alto-load-", dir=folder) as name:
        folder = Path(name)
        home = folder / "home"
        if kind == "sqlite":
            settings = load_settings({"ALTO_HOME": str(home)})
            prepare_environment(settings)
            yield settings, settings.mlflow_tracking_uri, None
            return
        from postgres import make_database, postgres_server

        with postgres_server() as template:
            url = make_database(template, "mlflow").replace("postgresql://", "postgresql+psycopg://")
            server = MlflowServer(folder, url)
            settings = load_settings({"ALTO_HOME": str(home), "MLFLOW_TRACKING_URI": server.url})
            prepare_environment(settings)
            server.start()
            try:
                yield settings, url, server
            finally:
                server.kill()


def open_task(settings: Settings, num_jobs: int, num_steps: int) -> TaskRuns:
    """The runs of the made-up task, new or found again."""
    data = DatasetSummary(
        name="rows", source="rows", digest="d", num_train=num_steps * 4, num_validation=NUM_ROWS, num_test=0,
        num_tokens=10**6,
    )  # fmt: skip
    return Tracker(settings).open_task(_task(num_steps), TASK_ID, _jobs(num_jobs), data)


def steps(job_index: int, job_id: str, first: int, last: int) -> list[StepRecord]:
    """The records of a job's steps."""
    return [
        StepRecord(
            job_id=job_id, step=step, train_loss=train_loss(job_index, step), learning_rate=1e-4, grad_norm=0.5 + step,
            num_tokens=512,
        )
        for step in range(first, last + 1)
    ]  # fmt: skip


def train_loss(job_index: int, step: int) -> float:
    return 1.0 + job_index / 7 + 3.0 / step


def evaluation(job_index: int, job_id: str, step: int, num_steps: int) -> Evaluation:
    """The evaluation of a job at a step."""
    sums = tuple(float(row % 5 + 1) * train_loss(job_index, step) for row in range(NUM_ROWS))
    rows = RowLosses(loss_sums=sums, num_labels=(20,) * NUM_ROWS)
    return Evaluation(job_id=job_id, step=step, fraction=step / num_steps, row_losses=rows)


def count(database_url: str, run_ids: Sequence[str], num_steps: int, evaluations: int, extra_keys: int = 0) -> Arrived:
    """Compare the database with what was logged: points of every step, and four of every evaluation."""
    import sqlalchemy

    per_step = 2 + extra_keys
    expected = len(run_ids) * (num_steps * per_step + 4 * evaluations)
    quoted = ", ".join(f"'{run_id}'" for run_id in run_ids)
    where = f"FROM metrics WHERE run_uuid IN ({quoted})"
    engine = sqlalchemy.create_engine(database_url)
    with engine.connect() as connection:
        total = connection.execute(sqlalchemy.text(f"SELECT count(*) {where}")).scalar_one()
        distinct = f"SELECT count(*) FROM (SELECT DISTINCT run_uuid, key, step {where}) AS points"
        different = connection.execute(sqlalchemy.text(distinct)).scalar_one()
        losses = connection.execute(
            sqlalchemy.text(f"SELECT run_uuid, step, value {where} AND key = 'train_loss'")
        ).all()
    engine.dispose()
    index = {run_id: i for i, run_id in enumerate(run_ids)}
    wrong = sum(value != train_loss(index[run_id], step) for run_id, step, value in losses)
    return Arrived(expected=expected, lost=expected - different, doubled=total - different, wrong=wrong)


def _task(num_steps: int) -> TuningTask:
    return parse_task(
        {
            "name": "load",
            "model": {"name": "org/model"},
            "data": {"source": "rows.jsonl"},
            "search_space": {"learning_rate": [1e-4], "lora_rank": [8]},
            "budget": {"steps": num_steps, "gate_warmup_fraction": 0.1},
        }
    )


def _jobs(count: int) -> tuple[LoraJob, ...]:
    return tuple(
        LoraJob(
            learning_rate=1e-5 * (i + 1), lora_rank=8, lora_alpha=16.0, adapter_batch_size=4, target_modules=("q_proj",)
        )
        for i in range(count)
    )
