"""A real cluster through everything that can befall it: two hosts, eight tasks, a kill, a cancel, a lost host.

    python benchmarks/cluster_run.py sqlite
    python benchmarks/cluster_run.py postgresql    # ALTO_STORE_URL names an empty database

Two `alto up` on this machine are two hosts with two pretended GPUs each; tasks train a tiny model on the CPU. Nobody's
word is taken for it: while it runs, all processes of runs are looked at from outside, with the GPUs that each may see.
Rows go to benchmarks/results/bars.csv, the story to benchmarks/results/cluster_run.csv.
"""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil
from bars import RESULTS, record_bar
from cluster_rig import HostProcess, claimed_gpus, free_port, quiet_environment, running_host, wait_until
from tiny_inputs import write_tiny_inputs

from alto_core.queue_states import QueueState, StopRequest
from alto_core.settings import load_settings
from alto_core.store import Fleet, Queue, Store

REPOSITORY = Path(__file__).resolve().parents[1]
KIND = sys.argv[1] if len(sys.argv) > 1 else "sqlite"
COMMAND = f"python benchmarks/cluster_run.py {KIND}"
HOSTS = ("left", "right")
LEASE_SECONDS = 30
GPUS = (1, 2, 1, 2, 1, 1, 2)
"""Of the tasks that are submitted at the beginning; one more comes late."""
PACKAGES = ("prefect", "ortools", "sqlmodel", "torch")
LOOK_SECONDS = 2.0
"""What the watch may be late in seeing that a process is gone."""


@dataclass
class Life:
    """A run's process, seen from outside."""

    task_id: str
    host: str
    gpus: str
    first: float
    last: float


class Watch(threading.Thread):
    """Looks twice a second at the process of every run, from the moment at which it has begun until it is gone."""

    def __init__(self, queue: Queue):
        super().__init__(daemon=True)
        self.lives: dict[psutil.Process, Life] = {}
        self.done = threading.Event()
        self._queue = queue

    def run(self) -> None:
        while not self.done.wait(0.5):
            now = time.monotonic()
            for process, life in self.lives.items():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                        life.last = now
            for entry in self._queue.entries(QueueState.RUNNING):
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(entry.process_id)
                    gpus = process.environ().get("CUDA_VISIBLE_DEVICES", "none")
                    self.lives.setdefault(process, Life(entry.task_id, entry.host_id or "", gpus, now, now))

    def overlaps(self) -> list[str]:
        """Two processes of one task, or of one GPU, at the same time."""
        lives = sorted(self.lives.values(), key=lambda life: life.first)
        found = []
        for i, one in enumerate(lives):
            for other in lives[i + 1 :]:
                both = min(one.last, other.last) - other.first
                shared = one.host == other.host and set(one.gpus.split(",")) & set(other.gpus.split(","))
                if both > LOOK_SECONDS and (one.task_id == other.task_id or shared):
                    found.append(f"{one} and {other}")
        return found


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="alto-cluster-", ignore_cleanup_errors=True) as folder:
        os.environ |= quiet_environment(Path(folder) / "home", lease_seconds=LEASE_SECONDS)
        os.environ |= {"ALTO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        if KIND == "sqlite":
            os.environ.pop("ALTO_STORE_URL", None)
        elif not os.environ.get("ALTO_STORE_URL", "").startswith("postgresql"):
            sys.exit("ALTO_STORE_URL: expected the URL of an empty PostgreSQL database")
        Story(Path(folder)).tell()


class Story:
    def __init__(self, folder: Path):
        self.folder = folder
        self.ports = (free_port(), free_port())
        self.started = time.monotonic()
        self.rows: list[tuple[str, str]] = []

    def tell(self) -> None:
        settings = load_settings()
        queue, fleet, store = Queue(settings), Fleet(settings), Store(settings)
        watch = Watch(queue)
        with self.host("left") as left:
            os.environ["PREFECT_API_URL"] = f"http://127.0.0.1:{self.ports[1]}/api"
            with self.host("right") as right:
                watch.start()
                task_ids = [self.submit(num_gpus, priority="normal") for num_gpus in GPUS]
                self.note("submitted", ", ".join(task_ids))

                def running(host: str | None = None) -> list[str]:
                    entries = queue.entries(QueueState.RUNNING)
                    return [e.task_id for e in entries if host in (None, e.host_id)]

                wait_until("two runs", lambda: len(running()) >= 2)
                killed = queue.entry(running()[0])
                assert killed.process_id
                os.kill(killed.process_id, signal.SIGKILL)
                self.note("killed", f"{killed.task_id} on {killed.host_id}")
                wait_until("the killed task to run again", lambda: queue.entry(killed.task_id).attempt > killed.attempt)
                self.note("dispatched again", killed.task_id)

                wait_until("another run", lambda: any(task_id != killed.task_id for task_id in running()))
                cancelled = next(task_id for task_id in running() if task_id != killed.task_id)
                seconds = self.cancel(cancelled)
                self.note("cancelled", f"{cancelled} in {seconds:.1f} s")

                late = self.submit(1, priority="urgent")
                self.note("came late", late)

                wait_until("a run on the right host", lambda: bool(running("right")))
                lost = running("right")
                right.kill()
                self.note("host lost", f"right, with {', '.join(lost)}")
                wait_until("the loss to be seen", lambda: any(h.is_lost for h in fleet.hosts()))
                wait_until("its tasks to be taken back", lambda: not set(running("right")))
                self.note("taken back", ", ".join(lost))
            with self.host("right"):
                self.note("host back", "right")
                everyone = [*task_ids, late]
                wait_until("all ends", lambda: all(store.task(t).state.is_end for t in everyone), seconds=1500)
                wait_until("all GPUs free", lambda: not queue.entries(QueueState.CLAIMED, QueueState.RUNNING))
                time.sleep(10)  # for the last processes to exit
                holders = [holder for host in fleet.hosts() for holder in host.holders.values() if holder]
                states = {task_id: str(store.task(task_id).state) for task_id in everyone}
        watch.done.set()
        left.wait()
        expected = {task_id: "cancelled" if task_id == cancelled else "finished" for task_id in everyone}
        doubles = [*watch.overlaps(), *_double_claims(queue)]
        self.note("ended", ", ".join(f"{task_id} {state}" for task_id, state in states.items()))
        for what in doubles:
            self.note("twice", what)
        assert states == expected, f"expected {expected}"
        assert not holders, f"GPUs still held by {holders}"
        assert not doubles
        assert len(watch.lives) >= len(everyone) - 1
        record_bar("cluster.cancel_seconds", seconds, target="<= 10", unit="s", packages=PACKAGES, command=COMMAND)
        record_bar("cluster.double_dispatches", len(doubles), target="= 0", packages=PACKAGES, command=COMMAND)
        self.write(len(doubles), seconds)

    def host(self, name: str) -> AbstractContextManager[HostProcess]:
        log = self.folder / f"{name}-{time.monotonic():.0f}.log"
        return running_host(name, gpus=(0, 1), ports=self.ports, log=log)

    def submit(self, num_gpus: int, *, priority: str) -> str:
        from flows.cli.submit import run_submit

        changes = [f"cluster.num_gpus={num_gpus}", f"cluster.priority={priority}"]
        return run_submit(self.task_file(), changes=changes, as_json=False)

    def cancel(self, task_id: str) -> float:
        from flows.cli.stop import run_stop

        started = time.monotonic()
        run_stop(task_id, StopRequest.CANCEL)
        return time.monotonic() - started

    def task_file(self) -> Path:
        """A task that takes about a minute, on the tiny model of the tests."""
        file = self.folder / "task.yaml"
        if not file.exists():
            write_tiny_inputs(self.folder)
            file.write_text(
                "name: tiny\nmodel: {name: ./model}\n"
                "data: {source: rows.jsonl, validation: {rows: 8}, test: {rows: 8}}\n"
                "search_space: {learning_rate: [1.0e-3, 1.0e-2], lora_rank: [2, 4], adapter_batch_size: 4}\n"
                "budget: {steps: 200, eval_interval_fraction: 0.05, gate_warmup_fraction: 0.2}\n"
                "cluster: {expected_minutes: 2}\n"
            )
        return file

    def note(self, what: str, text: str) -> None:
        at = f"{time.monotonic() - self.started:.0f}"
        self.rows.append((what, text))
        print(f"[{at:>4} s] {what}: {text}", flush=True)

    def write(self, num_doubles: int, cancel_seconds: float) -> None:
        file = RESULTS.parent / "cluster_run.csv"
        before = []
        if file.exists():
            with file.open(newline="", encoding="utf-8") as source:
                before = [row for row in csv.DictReader(source) if row["store"] != KIND]
        columns = ("store", "what", "text")
        rows = [dict(zip(columns, (KIND, *row), strict=True)) for row in self.rows]
        rows.append({"store": KIND, "what": "double dispatches", "text": str(num_doubles)})
        rows.append({"store": KIND, "what": "seconds to cancel", "text": f"{cancel_seconds:.1f}"})
        with file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows([*before, *rows])


def _double_claims(queue: Queue) -> list[str]:
    """Claims of a GPU or a task that was not released before, by the queue's own log."""
    held: dict[str, tuple[str, ...]] = {}
    taken: dict[str, str] = {}
    found = []
    begun: dict[str, int] = defaultdict(int)
    for event in queue.events():
        if event.kind == "claimed":
            gpus = tuple(f"{event.host_id}:{gpu}" for gpu in claimed_gpus(event))
            found += [f"{gpu} claimed by {event.task_id} and {taken[gpu]}" for gpu in gpus if gpu in taken]
            if event.task_id in held:
                found.append(f"{event.task_id} claimed twice")
            held[event.task_id] = gpus
            taken |= dict.fromkeys(gpus, event.task_id)
            begun[event.task_id] = 0
        elif event.kind == "begun":
            begun[event.task_id] += 1
            if begun[event.task_id] > 1:
                found.append(f"{event.task_id} begun twice in one claim")
        elif event.kind == "released":
            for gpu in held.pop(event.task_id, ()):
                taken.pop(gpu, None)
    return found


if __name__ == "__main__":
    main()
