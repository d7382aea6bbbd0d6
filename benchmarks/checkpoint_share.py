"""What checkpoints cost: how long training waits for them, over the wall time, with SmolLM2 at the default interval.

python benchmarks/checkpoint_share.py FOLDER   # FOLDER from examples/prepare_quickstart.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from bars import record_bar

from alto_core.checkpointing import Checkpointer
from alto_core.config import parse_task
from alto_core.cuts import CutLog, Session
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.executor import Executor, JobRun
from alto_core.preparation import plan_task
from alto_core.settings import load_settings


def measure(folder: Path, quickstart: Path, minutes: float) -> int:
    """Train SmolLM2 for some minutes, a cut at the default interval: what training waited, over the wall time."""
    content = {
        "name": "checkpoints",
        "model": {"name": str((quickstart / "model").resolve())},
        "data": {"source": str((quickstart / "train.jsonl").resolve()), "validation": {"rows": 4}},
        "search_space": {"learning_rate": 1e-3, "lora_rank": [8, 16], "adapter_batch_size": 2},
        "budget": {"steps": 4000, "eval_interval_fraction": 0.0005, "max_eval_share": 10},
    }
    plan = plan_task(parse_task(content))
    runs = [
        JobRun(job=job, budget=plan.budgets[job.job_id], folder=folder / job.job_id, start_step=0, target_step=4000)
        for job in plan.jobs
    ]
    checkpoints = Checkpointer(CutLog(folder / "cuts"), interval_seconds=load_settings({}).checkpoint_seconds)
    session = Session(until=1.0, job_ids=tuple(job.job_id for job in plan.jobs))
    modules, ranks = plan.jobs[0].target_modules, sum(job.lora_rank for job in plan.jobs)
    with Engine(load_backbone(plan.task.model, "cpu"), target_modules=modules, num_slots=2, rank_rows=ranks) as engine:
        executor = Executor(engine, plan.data, data_seed=0, checkpoints=checkpoints, session=session)
        training, started = executor.run(runs), time.monotonic()
        next(training)
        while time.monotonic() - started < 60 * minutes:
            training.send(())
        seconds, held = time.monotonic() - started, checkpoints.held_seconds
        training.close()
    cuts = len(list((folder / "cuts").glob("cut-*.json")))
    numbers = f"{checkpoints.written_bytes / 2**20:.0f} MiB written, {held:.2f} s waited of {seconds:.0f} s"
    print(f"{numbers}: {100 * held / seconds:.3f} %")
    if not cuts:
        sys.exit(f"no cut in {minutes:g} minutes: give it more")
    command = f"python benchmarks/checkpoint_share.py FOLDER --minutes {minutes:g}"
    record_bar("checkpoint.share_of_time", held / seconds, target="<= 0.01", packages=("torch",), command=command)
    return int(held / seconds > 0.01)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return measure(Path(folder), given.folder, given.minutes)


if __name__ == "__main__":
    sys.exit(main())
