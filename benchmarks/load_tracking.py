"""Tracking under load, and what tracking costs: points per second, lag and loss of points; CPU seconds of a whole task.

    python benchmarks/load_tracking.py                  # 64 jobs x 2,000 steps x 4 metrics, on SQLite and PostgreSQL
    python benchmarks/load_tracking.py --cost           # 60 jobs x 27 evaluations in the time of a run on a GPU

The load goes in as fast as it is taken; the detectors read the curves at each boundary, and at some of them decide.
The cost run lets the time of a training pass between its boundaries, so that the side thread works beside it as it does
in a task. Results go to results/tracking_load.csv, the bars to results/bars.csv.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from bars import record_bar
from tracking_rig import count, evaluation, mlflow, open_task, steps

RESULTS = Path(__file__).resolve().parent / "results" / "tracking_load.csv"
COLUMNS = (
    "run", "store", "jobs", "steps", "points", "seconds", "points_per_second", "log_ms_per_boundary", "read_ms",
    "decide_ms", "lag_s_median", "lag_s_max", "held_seconds", "caller_cpu_seconds",
    "caller_cpu_share", "cpu_seconds", "lost", "doubled", "wrong",
)  # fmt: skip
LOAD_JOBS, LOAD_STEPS, LOAD_BOUNDARIES = 64, 2000, 40
COST_SECONDS, COST_EVALUATIONS, COST_GROUPS = 245.0, 27, {1: 3000, 2: 1500, 4: 750, 8: 375}
"""The task of end_to_end.py: 15 jobs of each batch size, and the steps that three epochs of 1,000 rows make of it."""


class LagMeter:
    """How long what was spooled took to be in MLflow; watches the spool's cursor from a thread."""

    def __init__(self, runs: Any):
        self._spool = runs._outbox._spool
        self._marks: list[tuple[int, float]] = []
        self.lags: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def mark(self) -> None:
        """Everything up to here was logged now."""
        self._marks.append((self._spool.end, time.monotonic()))

    def close(self) -> None:
        """After the last delivery."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            is_over, cursor, now = self._over.is_set(), self._spool.cursor, time.monotonic()
            while self._marks and self._marks[0][0] <= cursor:
                self.lags.append(now - self._marks.pop(0)[1])
            if is_over:
                return
            time.sleep(0.05)


def load(store: str, num_steps: int) -> dict[str, object]:
    """64 jobs, all at once."""
    with mlflow(store) as (settings, database_url, _):
        runs = open_task(settings, LOAD_JOBS, num_steps)
        ids = list(runs.job_run_ids)
        lag, span = LagMeter(runs), num_steps // LOAD_BOUNDARIES
        logged: list[float] = []
        read: list[float] = []
        decided: list[float] = []
        started, held_before = time.perf_counter(), runs.seconds_spent
        for last in range(span, num_steps + 1, span):
            begin = time.perf_counter()
            for i, job_id in enumerate(ids):
                runs.log_steps(steps(i, job_id, last - span + 1, last))
                for step in range(last - span + 1, last + 1):  # two more metrics a step than a training logs
                    values = {"third": 1.0 / step, "fourth": float(i)}
                    runs._outbox.put_values(runs.job_run_ids[job_id], step, values)
            runs.log_evaluations([evaluation(i, job_id, last, num_steps) for i, job_id in enumerate(ids)])
            lag.mark()
            logged.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            curves = runs.read_curves(ids)
            read.append(time.perf_counter() - begin)
            assert all(curve.last_step == last for curve in curves.values())
            if last % (4 * span) == 0:
                begin = time.perf_counter()
                runs.settled_curves(ids[:1])
                decided.append(time.perf_counter() - begin)
        runs.flush(600)
        seconds = time.perf_counter() - started
        held = runs.seconds_spent - held_before
        runs.release()
        lag.close()
        arrived = count(database_url, list(runs.job_run_ids.values()), num_steps, LOAD_BOUNDARIES, extra_keys=2)
    return {
        "run": "load", "store": store, "jobs": LOAD_JOBS, "steps": num_steps, "points": arrived.expected,
        "seconds": f"{seconds:.1f}", "points_per_second": f"{arrived.expected / seconds:.0f}",
        "log_ms_per_boundary": f"{1e3 * statistics.median(logged):.1f}",
        "read_ms": f"{1e3 * statistics.median(read):.1f}", "decide_ms": f"{1e3 * statistics.median(decided):.1f}",
        "lag_s_median": f"{statistics.median(lag.lags):.1f}", "lag_s_max": f"{max(lag.lags):.1f}",
        "held_seconds": f"{held:.1f}", "lost": arrived.lost, "doubled": arrived.doubled, "wrong": arrived.wrong,
    }  # fmt: skip


def cost(seconds: float, wait_at_boundaries: bool) -> dict[str, object]:
    """60 jobs, 15 at a time; what tracking takes of the caller's time and of the processor's."""
    with mlflow("sqlite") as (settings, _url, _):
        longest = max(COST_GROUPS.values())
        runs = open_task(settings, 60, longest)
        ids = list(runs.job_run_ids)
        pause = seconds / (COST_EVALUATIONS * len(COST_GROUPS))
        held_before, cpu_before, caller_cpu = runs.seconds_spent, _cpu_seconds(), 0.0
        begin = time.perf_counter()
        for group, total in enumerate(COST_GROUPS.values()):
            members = list(enumerate(ids))[15 * group : 15 * group + 15]
            done = 0
            for boundary in range(1, COST_EVALUATIONS + 1):
                made = time.thread_time()
                last = total * boundary // COST_EVALUATIONS
                records = [record for i, job_id in members for record in steps(i, job_id, done + 1, last)]
                evaluations = [evaluation(i, job_id, last, total) for i, job_id in members]
                done, logged = last, time.thread_time()
                cpu_before += logged - made  # making the numbers up is no tracking
                runs.log_steps(records)
                runs.log_evaluations(evaluations)
                if wait_at_boundaries:
                    runs.flush()
                runs.read_curves([job_id for _, job_id in members])
                caller_cpu += time.thread_time() - logged
                time.sleep(pause)
        held = runs.seconds_spent - held_before
        runs.flush()
        wall, cpu = time.perf_counter() - begin, _cpu_seconds() - cpu_before
        runs.release()
    return {
        "run": "cost, waiting at boundaries" if wait_at_boundaries else "cost", "store": "sqlite", "jobs": 60,
        "steps": sum(15 * total for total in COST_GROUPS.values()), "seconds": f"{wall:.1f}",
        "held_seconds": f"{held:.2f}", "caller_cpu_seconds": f"{caller_cpu:.2f}",
        "caller_cpu_share": f"{caller_cpu / COST_SECONDS:.4f}", "cpu_seconds": f"{cpu:.1f}",
    }  # fmt: skip


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def write_rows(rows: list[dict[str, object]]) -> None:
    """In place of earlier rows of the same run and store."""
    kept: dict[tuple[object, object], dict[str, object]] = {}
    if RESULTS.exists():
        with RESULTS.open(newline="", encoding="utf-8") as source:
            kept = {(row["run"], row["store"]): dict(row) for row in csv.DictReader(source)}
    kept |= {(row["run"], row["store"]): row for row in rows}
    with RESULTS.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n", restval="", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true", help="measure the cost of a whole task")
    parser.add_argument("--seconds", type=float, default=COST_SECONDS, help="of training to let pass in the cost run")
    parser.add_argument("--wait", action="store_true", help="wait for MLflow at each boundary of the cost run")
    parser.add_argument(
        "--steps", type=int, default=LOAD_STEPS, help="per job of the load, a multiple of 40; fewer: no bar"
    )
    parser.add_argument("--store", choices=("sqlite", "postgresql"), help="only this one")
    options = parser.parse_args()
    if options.cost:
        rows = [cost(options.seconds, options.wait)]
    else:
        rows = [
            load(store, options.steps) for store in ([options.store] if options.store else ("sqlite", "postgresql"))
        ]
        if options.steps == LOAD_STEPS:
            slowest = min(float(str(row["points_per_second"])) for row in rows)
            target = "> 0, with 0 lost"
            record_bar("load.points_per_second", slowest, target=target, unit="points/s", packages=("mlflow",))
    write_rows(rows)
    for row in rows:
        print(", ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
