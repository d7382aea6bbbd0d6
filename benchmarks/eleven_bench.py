"""One real cluster, and the variants of `eleven_tasks.py` that go through it one after the other."""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster_rig import HostProcess
from eleven_cases import Case, Inputs, ordered_cases
from eleven_measures import Hold, bars, covers, first_submission, foreseen_seconds, holds, idle_share, replan_seconds
from plan_fig12 import VARIANTS

from alto_core.cleaning import free_states, stored_states
from alto_core.cluster.expectation import expected_seconds
from alto_core.config import TuningTask
from alto_core.domain import TaskState
from alto_core.preparation import create_task, plan_task
from alto_core.report import count_samples, job_rows
from alto_core.settings import load_settings
from alto_core.store import Demand, KeptPlan, Queue, Store
from alto_core.task_lock import held_if_free

COLUMNS = (
    "row", "shape", "share", "devices", "variant", "task", "num_gpus", "gpus", "claimed", "begun", "ended", "state",
    "samples_saved", "makespan", "foreseen", "idle_share", "replan_median", "replan_max",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A task that the store knows and the queue does not yet."""

    task_id: str
    task: TuningTask
    num_gpus: int
    num_tokens: int
    lock: ExitStack
    """Held until it is submitted: a task that nobody holds is taken for a dead process's after a while."""


class OutOfTimeError(Exception):
    """The time of the whole program is over."""


class Bench:
    """One cluster, and the variants that go through it one after the other."""

    def __init__(self, options: argparse.Namespace, inputs: Inputs, host: HostProcess, deadline: float):
        self._options, self._inputs, self._host, self._deadline = options, inputs, host, deadline
        self._settings = load_settings()
        self._queue, self._store = Queue(self._settings), Store(self._settings)
        self._cases = ordered_cases()
        self._devices = f"{options.gpus} {'GPUs' if options.shape == 'paper' else 'pretended'}"

    def measure(self, variants: Sequence[str]) -> None:
        """Stops quietly when the time is over: what was measured is written down."""
        try:
            batched = VARIANTS[variants[0]][0]
            one_a_model = list({case.model: case for case in self._cases}.values())
            first = [self._record(case, self._inputs.profiling_task(case, batched=batched)) for case in one_a_model]
            for one in first:
                self._submit(one)
            print("measuring the models, recording the tasks ...", flush=True)
            lines = {variant: self._line(variant) for variant in variants}
            self._carry_out([], scheduled=True)
            if failures := [told for one in first if (told := self._failure(one))]:
                sys.exit("\n".join(failures))
            for variant, line in lines.items():
                self._measure_variant(variant, line)
        except OutOfTimeError:
            print("the time is over", flush=True)

    def _line(self, variant: str) -> list[Recorded]:
        batched, early_exit, _, _ = VARIANTS[variant]
        make = self._inputs.task
        return [self._record(case, make(case, batched=batched, early_exit=early_exit)) for case in self._cases]

    def _measure_variant(self, variant: str, line: Sequence[Recorded]) -> None:
        before = self._queue.events()[-1].event_id
        plan = self._carry_out(line, scheduled=VARIANTS[variant][2])
        events = self._queue.events(after_id=before)
        zero, ended = first_submission(events), holds(events)
        rows = [self._task_row(variant, case, one, ended) for case, one in zip(self._cases, line, strict=True)]
        unfinished = [row["task"] for row in rows if row["state"] != TaskState.FINISHED]
        replans = replan_seconds(events)
        whole = {
            **self._row(variant),
            "state": f"not finished: {', '.join(unfinished)}" if unfinished else "finished",
            "makespan": "" if unfinished else f"{ended[-1].released:.1f}",
            "foreseen": "" if plan is None else f"{foreseen_seconds(plan, zero):.1f}",
            "idle_share": f"{idle_share(ended, self._options.gpus):.4f}",
            "replan_median": f"{statistics.median(replans):.2f}" if replans else "",
            "replan_max": f"{max(replans):.2f}" if replans else "",
        }
        save(self._options.out, [whole, *rows])
        for one in line:
            free_states(stored_states(self._settings, one.task_id))

    def _record(self, case: Case, task: TuningTask) -> Recorded:
        if time.monotonic() > self._deadline:
            raise OutOfTimeError
        plan = plan_task(task)
        task_id = self._store.new_task_id(task.name)
        lock = ExitStack()
        folder = self._settings.task_folder(task_id)
        folder.mkdir(parents=True)
        lock.enter_context(held_if_free(folder))
        create_task(plan, task_id, self._settings)
        return Recorded(task_id=task_id, task=plan.task, num_gpus=case.num_gpus, num_tokens=plan.num_tokens, lock=lock)

    def _submit(self, one: Recorded) -> None:
        one.lock.close()
        seconds = expected_seconds(one.task, one.num_tokens, self._store)
        self._queue.submit(one.task_id, Demand(num_gpus=one.num_gpus, expected_seconds=seconds))

    def _carry_out(self, line: Sequence[Recorded], *, scheduled: bool) -> KeptPlan | None:
        """Submit a line of tasks and wait until the queue is empty. Returns the first plan that has them all."""
        waiting, first_plan = list(line), None
        while waiting or self._queue.entries():
            free = self._options.gpus - sum(entry.demand.num_gpus for entry in self._queue.entries())
            while waiting and (scheduled or waiting[0].num_gpus <= free):
                free -= waiting[0].num_gpus
                self._submit(waiting.pop(0))
            plan = self._queue.latest_plan() if scheduled and first_plan is None else None
            if plan is not None and line and covers(plan, [one.task_id for one in line]):
                first_plan = plan
            if self._host.has_ended:
                sys.exit(f"alto up ended:\n{self._host.log.read_text()}")
            if time.monotonic() > self._deadline:
                raise OutOfTimeError
            time.sleep(0.3)
        return first_plan

    def _failure(self, one: Recorded) -> str:
        """How a task ended, if it did not finish."""
        record = self._store.task(one.task_id)
        return "" if record.state is TaskState.FINISHED else f"{one.task_id} {record.state}: {record.message}"

    def _row(self, variant: str, task: str = "") -> dict[str, Any]:
        options = self._options
        shape = options.shape if options.depth == 1 else f"{options.shape} {options.depth:g} deep"
        name = f"{shape} {variant} {task}".strip()
        about = {"row": name, "shape": shape, "share": f"{options.share:.6g}", "devices": self._devices}
        return {**dict.fromkeys(COLUMNS, ""), **about, "variant": variant, "task": task}

    def _task_row(self, variant: str, case: Case, one: Recorded, ended: Sequence[Hold]) -> dict[str, Any]:
        record = self._store.task(one.task_id)
        own = [hold for hold in ended if hold.task_id == one.task_id]
        result = record.result or {}
        saved = count_samples(job_rows(self._store.jobs(one.task_id)), num_train_rows=result["num_train_rows"])
        if failure := self._failure(one):
            print(f"{variant}: {failure}", flush=True)
        return {
            **self._row(variant, case.name),
            "num_gpus": case.num_gpus,
            "gpus": " ".join(map(str, own[-1].gpus)),
            "claimed": f"{own[0].claimed:.1f}",
            "begun": "" if own[-1].begun is None else f"{own[-1].begun:.1f}",
            "ended": f"{own[-1].released:.1f}",
            "state": str(record.state),
            "samples_saved": f"{saved.saved_share:.4f}",
        }


def save(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows in place of those of the same name, make the bars of all that is known anew, and tell the first row."""
    from benchmarks.bench_lora_linear import environment

    file, known = out / "eleven_tasks.csv", {}
    if file.exists():
        with file.open(newline="", encoding="utf-8") as source:
            known = {row["row"]: row for row in csv.DictReader(source)}
    known |= {row["row"]: row for row in rows}
    with file.open("w", newline="", encoding="utf-8") as target:
        writer = csv.DictWriter(target, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known.values())
    content = {**environment(), "bars": bars(known.values()), "command": shlex.join(["python", *sys.argv])}
    (out / "eleven_tasks.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    print("   ".join(f"{name} {rows[0][name]}" for name in COLUMNS if rows[0][name]), flush=True)
