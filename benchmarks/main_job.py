"""The main job as a newcomer meets it: time, memory, repeatability and gain of the quickstart; time of a whole CI run.

    python benchmarks/main_job.py quickstart              # two runs, each in a workspace of its own
    python benchmarks/main_job.py quickstart ALTO_HOME    # one run, held against the finished one in that workspace
    python benchmarks/main_job.py ci ALTO_HOME            # one run of .ci/run in an installed checkout, likewise

Rows go to benchmarks/results/bars.csv.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from bars import record_bar

REPOSITORY = Path(__file__).resolve().parents[1]
COMMAND = " ".join(["python benchmarks/main_job.py", *sys.argv[1:2], *("ALTO_HOME" for _ in sys.argv[2:])])
PACKAGES = ("torch", "transformers", "prefect", "mlflow")


class MemoryWatch(threading.Thread):
    """Highest sum of resident memory over a process and its children, sampled ten times a second."""

    def __init__(self, process: psutil.Process):
        super().__init__(daemon=True)
        self.process, self.peak_bytes, self.done = process, 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.1):
            total = 0
            try:
                family = [self.process, *self.process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for member in family:
                try:
                    total += member.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def run_quickstart() -> dict[str, Any]:
    """`make quickstart` in a fresh workspace; returns the result object with `wall_seconds` and `peak_bytes`."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "ALTO_HOME": home}
        subprocess.run([sys.executable, "examples/prepare_quickstart.py", "quickstart"], cwd=REPOSITORY, check=True)
        command = [str(Path(sys.executable).with_name("alto")), "tune", "examples/quickstart.yaml", "--json"]
        started = time.monotonic()
        with subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as child:
            watch = MemoryWatch(psutil.Process(child.pid))
            watch.start()
            output, _ = child.communicate()
            watch.done.set()
        if child.returncode:
            raise SystemExit(f"alto tune ended with exit code {child.returncode}")
    result = json.loads(output.strip().splitlines()[-1])
    return {**result, "wall_seconds": time.monotonic() - started, "peak_bytes": watch.peak_bytes}


def decisions(result: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What early exit decided, job by job."""
    return sorted((row["job_id"], row["state"], row["step"], row["gate_rank"]) for row in result["leaderboard"])


def earlier_run(home: str) -> dict[str, Any]:
    """The result object of the newest finished quickstart of a workspace."""
    command = [str(Path(sys.executable).with_name("alto")), "status", "--json"]
    environment = {**os.environ, "ALTO_HOME": home}
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    tasks = [json.loads(line) for line in listed]
    newest = next(t["task_id"] for t in tasks if t["task_id"].startswith("word-reversal-") and t["state"] == "finished")
    shown = subprocess.run([*command, newest], env=environment, capture_output=True, text=True, check=True).stdout
    result: dict[str, Any] = json.loads(shown.strip().splitlines()[-1])
    return {**result, "wall_seconds": result["seconds"]}


def quickstart(earlier_home: str | None = None) -> None:
    first = run_quickstart()
    record_quickstart(first, earlier_run(earlier_home) if earlier_home else run_quickstart())


def record_quickstart(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Check that two runs decided the same, and record the figures of the first."""
    if decisions(first) != decisions(second) or first["winner"] != second["winner"]:
        raise SystemExit(f"two runs decided differently:\n{decisions(first)}\n{decisions(second)}")
    test = {score["job_id"]: score["metric_value"] for score in first["scores"] if score["split"] == "test"}
    winner, untuned = test[first["winner"]], test[None]
    record_bar(
        "main.quickstart_seconds", first["wall_seconds"], target="<= 600", unit="s", packages=PACKAGES, command=COMMAND
    )
    record_bar(
        "main.quickstart_peak_gib",
        first["peak_bytes"] / 2**30,
        target="<= 6",
        unit="GiB",
        packages=PACKAGES,
        command=COMMAND,
    )
    record_bar(
        "main.exact_match_gain", winner["value"] - untuned["value"], target=">= 0.2", packages=PACKAGES, command=COMMAND
    )
    record_bar("main.tracking_share", first["tracking_share"], target="<= 0.03", packages=PACKAGES, command=COMMAND)
    print("| run | seconds | peak GiB | winner | exact match of winner | untuned | tracking share |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number, result in enumerate((first, second), start=1):
        print(
            f"| {number} | {result['wall_seconds']:.0f} | {result['peak_bytes'] / 2**30:.2f} | {result['winner']} | "
            f"{winner['value']:.3f} [{winner['low']:.3f}, {winner['high']:.3f}] | "
            f"{untuned['value']:.3f} [{untuned['low']:.3f}, {untuned['high']:.3f}] | {result['tracking_share']:.4f} |"
        )
    print("same verdicts, same winner")


def ci(earlier_home: str) -> None:
    """`.ci/run` as it stands, watched: its quickstart is held against the finished one of another workspace."""
    home = REPOSITORY / ".alto"
    if home.exists():
        raise SystemExit(f"{home} exists: the quickstart of a CI run starts in a workspace of its own. Move it away.")
    started = time.monotonic()
    begun: dict[str, float] = {}
    peak_bytes = 0
    with subprocess.Popen(["bash", ".ci/run"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        watch = MemoryWatch(psutil.Process(child.pid))
        watch.start()
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith("== "):
                begun[line.split()[1]] = time.monotonic()
            if line.startswith("== check"):
                watch.done.set()
                peak_bytes = watch.peak_bytes
    if child.returncode:
        raise SystemExit(f".ci/run ended with exit code {child.returncode}")
    seconds = time.monotonic() - started
    mine = {**earlier_run(str(home)), "wall_seconds": begun["check"] - begun["quickstart"], "peak_bytes": peak_bytes}
    record_quickstart(mine, earlier_run(earlier_home))
    record_bar("main.ci_seconds", seconds, target="<= 1500", unit="s", packages=PACKAGES, command=COMMAND)
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    {"quickstart": quickstart, "ci": ci}[sys.argv[1]](*sys.argv[2:])
