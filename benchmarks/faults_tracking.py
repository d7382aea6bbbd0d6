"""Faults of tracking while jobs log and detectors decide; afterwards every point must be there, once, with its value.

    python benchmarks/faults_tracking.py                # all; --only NAME for one, --folder on a disk of your choice

| fault | what happens |
| --- | --- |
| server | an MLflow server on PostgreSQL is killed and started again five times |
| process | the logging process is killed five times; each time a new one goes on from its last checkpoint |
| disk | the disk of the workspace, MLflow's database included, is full for a while (a tmpfs; needs root) |
| locked | another program holds MLflow's SQLite file locked for fifteen seconds |
| clock | the clock is set back by an hour |

Rows go to results/tracking_faults.csv, the sum of lost, doubled and wrong points to results/bars.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

from bars import record_bar
from tracking_rig import count, evaluation, mlflow, open_task, steps

from alto_core.domain import CurveSource
from alto_core.settings import load_settings
from alto_core.tracking import TaskRuns, deliver_left_behind

RESULTS = Path(__file__).resolve().parent / "results" / "tracking_faults.csv"
COLUMNS = (
    "fault", "store", "jobs", "steps", "points", "times", "decisions_on_spool", "longest_boundary_s", "lost", "doubled",
    "wrong",
)  # fmt: skip
JOBS, STEPS, SPAN = 8, 600, 20
PACE_SECONDS, SLOW_PACE_SECONDS = 0.5, 5.0
"""Between two boundaries; slower where a server has to start again meanwhile."""


class Training:
    """Jobs that log boundary after boundary; a decision about one of them at each."""

    def __init__(self, runs: TaskRuns, pace: float = PACE_SECONDS):
        self.runs, self._pace = runs, pace
        self.on_spool = 0
        """Decisions that MLflow was not waited for."""
        self.longest_seconds = 0.0
        """That a boundary was held up by tracking."""

    def boundary(self, last: int) -> None:
        """The steps up to this one, an evaluation, a decision."""
        ids, begin = list(self.runs.job_run_ids), time.monotonic()
        for i, job_id in enumerate(ids):
            self.runs.log_steps(steps(i, job_id, last - SPAN + 1, last))
        self.runs.log_evaluations([evaluation(i, job_id, last, STEPS) for i, job_id in enumerate(ids)])
        judged = ids[last // SPAN % len(ids)]
        curve = self.runs.settled_curves([judged])[judged]
        self.on_spool += self.runs.curve_source(judged) is CurveSource.SPOOL
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - begin)
        assert curve.train_steps == tuple(range(1, last + 1)), "a detector did not see every step"

    def go_on(self, first: int = 1, until: Callable[[int], bool] = lambda last: False) -> int:
        """Boundaries at their pace, to the end or until told to stop; the last step made."""
        for last in range(first + SPAN - 1, STEPS + 1, SPAN):
            self.boundary(last)
            if until(last):
                return last
            time.sleep(self._pace)
        return STEPS


def server_killed(folder: Path) -> dict[str, object]:
    """Kill, wait, start, five times; the training ends when the last start is over."""
    with mlflow("postgresql", folder) as (settings, url, server):
        assert server is not None
        training = Training(open_task(settings, JOBS, STEPS), SLOW_PACE_SECONDS)
        thread = threading.Thread(target=training.go_on)
        thread.start()
        for _ in range(5):
            time.sleep(2.0)
            server.kill()
            time.sleep(1.0)
            server.start()
        thread.join()
        return _row("server", "postgresql", training, url, times=5)


def process_killed(folder: Path) -> dict[str, object]:
    """SIGKILL at random moments; what a checkpoint covers is not made again, the rest is."""
    chance = random.Random(0)
    with mlflow("sqlite", folder) as (settings, url, _):
        training = Training(open_task(settings, JOBS, STEPS))
        kills = 0
        while True:
            command = [sys.executable, "-W", "ignore", __file__, "--child", str(settings.home)]
            child = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert child.stdout is not None
            child.stdout.readline()  # it has begun
            if kills < 5:
                time.sleep(chance.uniform(0.2, 4.0))
                child.send_signal(signal.SIGKILL)
                kills += child.wait() == -signal.SIGKILL
            elif child.wait() == 0:
                break
        deliver_left_behind(settings)
        return _row("process", "sqlite", training, url, times=kills)


def child(home: Path) -> None:
    """One life of the logging process: from its checkpoint on, a new one every three boundaries."""
    settings, checkpoint = load_settings({"ALTO_HOME": str(home)}), home / "checkpoint.json"
    done = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
    training = Training(open_task(settings, JOBS, STEPS))
    print("begun", flush=True)

    def save(last: int) -> bool:
        if last % (3 * SPAN) == 0:
            fresh = checkpoint.with_suffix(".new")
            fresh.write_text(json.dumps({"step": last}))
            fresh.replace(checkpoint)
        return False

    training.go_on(done + 1, save)
    training.runs.release(600)


def disk_full(folder: Path) -> dict[str, object]:
    """Everything on a small tmpfs; a file takes what is left of it, and goes away after ten boundaries."""
    with _tmpfs(folder / "small", "64m") as small, mlflow("sqlite", small) as (settings, url, _):
        training, filler = Training(open_task(settings, JOBS, STEPS)), small / "filler"
        done = training.go_on(until=lambda last: last == 5 * SPAN)
        with filler.open("wb") as out:
            try:
                while True:
                    out.write(b"\0" * 2**16)
                    out.flush()
            except OSError:
                pass
        done = training.go_on(done + 1, until=lambda last: last == 15 * SPAN)
        filler.unlink()
        training.go_on(done + 1)
        return _row("disk", "sqlite", training, url)


def database_locked(folder: Path) -> dict[str, object]:
    """For fifteen seconds nobody else can write."""
    with mlflow("sqlite", folder) as (settings, url, _):
        training = Training(open_task(settings, JOBS, STEPS))
        done = training.go_on(until=lambda last: last == 5 * SPAN)
        with closing(sqlite3.connect(settings.home / "mlflow.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            release = time.monotonic() + 15
            done = training.go_on(done + 1, until=lambda last: time.monotonic() > release)
            other.execute("ROLLBACK")
        training.go_on(done + 1)
        return _row("locked", "sqlite", training, url)


def clock_set_back(folder: Path) -> dict[str, object]:
    """From the tenth boundary on the clock is an hour behind; then the process ends, and the next one resumes."""
    real = time.time
    with mlflow("sqlite", folder) as (settings, url, _):
        training = Training(open_task(settings, JOBS, STEPS))
        training.go_on(until=lambda last: last == 10 * SPAN)
        with mock.patch("time.time", lambda: real() - 3600):
            training.go_on(10 * SPAN + 1, until=lambda last: last == 15 * SPAN)
            training.runs.release()
            resumed = Training(open_task(settings, JOBS, STEPS))
            resumed.go_on(14 * SPAN + 1)
        return _row("clock", "sqlite", resumed, url)


FAULTS = {
    "server": server_killed,
    "process": process_killed,
    "disk": disk_full,
    "locked": database_locked,
    "clock": clock_set_back,
}


@contextmanager
def _tmpfs(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False)
    if mounted.returncode:
        raise SystemExit("the fault `disk` needs the right to mount; run the others with --only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def _row(fault: str, store: str, training: Training, database_url: str, *, times: int = 1) -> dict[str, object]:
    """Deliver the rest, and count."""
    training.runs.flush(600)
    training.runs.release()
    arrived = count(database_url, list(training.runs.job_run_ids.values()), STEPS, STEPS // SPAN)
    return {
        "fault": fault, "store": store, "jobs": JOBS, "steps": STEPS, "points": arrived.expected, "times": times,
        "decisions_on_spool": training.on_spool, "longest_boundary_s": f"{training.longest_seconds:.1f}",
        "lost": arrived.lost, "doubled": arrived.doubled, "wrong": arrived.wrong,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(FAULTS), help="one of the faults")
    parser.add_argument("--folder", type=Path, help="where the workspaces lie; a temporary folder by default")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    rows = {}
    if RESULTS.exists():
        with RESULTS.open(newline="", encoding="utf-8") as source:
            rows = {row["fault"]: dict(row) for row in csv.DictReader(source)}
    for name in [options.only] if options.only else FAULTS:
        with tempfile.TemporaryDirectory(prefix="alto-faults-", dir=options.folder) as folder:
            rows[name] = FAULTS[name](Path(folder))
        print(", ".join(f"{column} {value}" for column, value in rows[name].items()), flush=True)
    with RESULTS.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
    if rows.keys() == FAULTS.keys():
        lost = sum(int(str(row[column])) for row in rows.values() for column in ("lost", "doubled", "wrong"))
        command = "python benchmarks/faults_tracking.py"
        record_bar("faults.points_lost", lost, target="= 0", unit="points", packages=("mlflow",), command=command)


if __name__ == "__main__":
    main()
