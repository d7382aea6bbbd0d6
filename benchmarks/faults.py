"""What becomes of a task whose process is killed.

    python benchmarks/faults.py                    # 40 kills over all stages, each gone on with by `alto resume`
    python benchmarks/faults.py --count 4 --core   # the same without Prefect and without writing results

A kill is SIGKILL at a moment drawn over a stage's time in an unbroken run. A task is killed in up to five of its six
stages and gone on with each time; in the end it must have the unbroken run's curves in MLflow, point for point and each
point once, its verdicts, decisions, scores and adapter, bit for bit.
Rows go to benchmarks/results/bars.csv, one line per kill to benchmarks/results/faults_kills.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from bars import RESULTS, record_bar
from killed_runs import Runs
from tiny_inputs import write_tiny_inputs

from flows.cli.services import LOOPBACK, RunningService, Service

REPOSITORY = Path(__file__).resolve().parents[1]
STAGES = ("profile", "warmup", "gate", "continue", "evaluate", "register")
PACKAGES = ("torch", "transformers", "prefect", "mlflow")
CUT_SECONDS = 1.0
"""Between checkpoints in the kill runs, so that a run of some seconds has many."""
KILLS_PER_TASK = 5
RESULTS_OF_KILLS = RESULTS.parent / "faults_kills.csv"
COLUMNS = (
    "kill",
    "task",
    "stage",
    "delay_seconds",
    "steps_at_kill",
    "steps_lost",
    "cuts_at_kill",
    "equal",
    "difference",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--add", action="store_true", help="to the kills of an earlier run in faults_kills.csv")
    parser.add_argument("--folder", type=Path, help="keep the homes of runs that were not equal here")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ALTO_DEVICE": "cpu"}
    with tempfile.TemporaryDirectory(prefix="alto-faults-", ignore_cleanup_errors=True) as folder:
        return kill_runs(given.folder or Path(folder), given.count, given.seed, core=given.core, add=given.add)


def kill_runs(folder: Path, count: int, seed: int, *, core: bool, add: bool) -> int:
    os.environ |= {"ALTO_CHECKPOINT_SECONDS": str(CUT_SECONDS), "ALTO_HOME": str(folder / "first")}
    os.environ |= {"PREFECT_LOGGING_LEVEL": "ERROR", "MLFLOW_LOGGING_LEVEL": "ERROR"}
    task_file = write_task(folder)
    rows = read_rows() if add else []
    with contextlib.nullcontext() if core else prefect_server(folder):
        runs, draw = Runs(folder, task_file, core=core), random.Random(seed)
        expected = runs.unbroken("unbroken")
        assert expected["exit status"] == 0, f"the unbroken run failed, see {folder / 'unbroken' / 'log.txt'}"
        for number in range(len(rows) + 1, 2 * count + 1):
            if len(rows) == count:
                break
            name = f"task-{number}"
            stages = sorted(draw.sample(STAGES, min(KILLS_PER_TASK, count - len(rows))), key=STAGES.index)
            kills, found = runs.killed(name, stages, draw)
            unequal = difference(found, expected)
            for kill in kills:
                equal = {"equal": not unequal, "difference": unequal}
                rows.append({"kill": len(rows) + 1, "task": number, **kill, **equal})
                print(rows[-1], flush=True)
            if not unequal:
                shutil.rmtree(folder / name, ignore_errors=True)
            if not core:
                write_rows(rows)
    equal = sum(row["equal"] for row in rows)
    print(f"{equal} of {len(rows)} equal")
    return int(equal < len(rows))


def read_rows() -> list[dict[str, Any]]:
    with RESULTS_OF_KILLS.open(newline="", encoding="utf-8") as source:
        return [{**row, "equal": row["equal"] == "True"} for row in csv.DictReader(source)]


def write_rows(rows: list[dict[str, Any]]) -> None:
    with RESULTS_OF_KILLS.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    value = sum(row["equal"] for row in rows) / len(rows)
    command = "python benchmarks/faults.py" + ("" if len(rows) == 40 else f" --count {len(rows)}")
    record_bar("faults.kills_resumed_equal", value, target="= 1", packages=PACKAGES, command=command)


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Names of what is not equal; empty when all is."""
    names = sorted(found.keys() | expected.keys())
    return ", ".join(name for name in names if repr(found.get(name)) != repr(expected.get(name)))


@contextmanager
def prefect_server(folder: Path) -> Iterator[None]:
    """One server for all runs; its own database."""
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    service = Service(
        name="Prefect",
        command=[sys.executable, "-m", "prefect", "server", "start", "--host", LOOPBACK, "--port", str(port)],
        port=port,
        health_path="/api/health",
        log_file=folder / "server.txt",
        environment={"PREFECT_HOME": str(folder / "prefect"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"},
    )
    server = RunningService(service)
    try:
        server.wait_until_up()
        os.environ["PREFECT_API_URL"] = f"{service.url}/api"
        yield
    finally:
        server.stop()


def write_task(folder: Path) -> Path:
    """A tiny model and 64 rows: four jobs, of which two train at a time and one diverges."""
    model, rows = write_tiny_inputs(folder)
    task = {
        "name": "faults",
        "model": {"name": str(model)},
        "data": {"source": str(rows), "validation": {"rows": 8}, "test": {"rows": 8}},
        "search_space": {
            "learning_rate": [1e-3, 3e-3, 1e-2, 1e30],
            "lora_rank": 4,
            "adapter_batch_size": 4,
            "dropout": 0.1,
        },
        "budget": {"steps": 16, "eval_interval_fraction": 0.25, "gate_warmup_fraction": 0.25},
        "early_exit": {"preset": "guarded"},
        "evaluation": {"metric": "exact_match", "max_new_tokens": 6},
        "max_slots": 2,
    }
    file = folder / "task.yaml"
    file.write_text(yaml.safe_dump(task))
    return file


if __name__ == "__main__":
    sys.exit(main())
