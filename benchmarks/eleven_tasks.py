"""Eleven tasks of four model shapes on eight GPUs of one host: what scheduling, batching and early exit are worth.

    python benchmarks/eleven_tasks.py --out FOLDER                              # on eight GPUs
    python benchmarks/eleven_tasks.py --record FOLDER                           # anywhere: takes them into results/
    python benchmarks/eleven_tasks.py --out FOLDER --shape tiny --variants B all    # on a CPU, GPUs pretended

The tasks, and what the variants mean, are those of `plan_fig12.py`, which simulates them: 70B on four GPUs, 32B on two,
8B and 7B on one, each on three data sets, less the last; B batched, EE with early exit (guarded), S scheduled. Here one
`alto up` runs them, through queue, planner, dispatch and the flows of tuning. Weights are random, rows made up with
the data sets' lengths; every data set is shortened to the same share of its rows, and a task has 16 jobs of rank 4.

Without S a task is submitted when it is first in line and so many GPUs are free; with S all are submitted at once.
Without B each GPU trains one job at a time. Tasks are recorded beforehand, so makespans run from the first submission
to the last end. Four short tasks come first, one a model: they measure its throughput and fill compilers' caches.

FOLDER gets eleven_tasks.csv, a row for each variant and one for each of its tasks (seconds after the first submission),
after every variant; rows that are there from an earlier call stay, unless they are measured anew.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cluster_rig import free_port, quiet_environment, running_host
from eleven_cases import SCALES, Inputs, ordered_cases

from alto_core.settings import load_settings, prepare_environment

LEASE_SECONDS = 120
VARIANTS = ("all", "B", "B+S", "B+EE", "EE", "S")
"""In the order in which they are measured; S after EE, which shows its planner how long tasks without batching take."""
MEMORY = Path("/dev/shm")


def measure(options: argparse.Namespace, deadline: float) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="alto-eleven-", ignore_cleanup_errors=True) as folder:
        os.environ |= quiet_environment(Path(folder) / "home", lease_seconds=LEASE_SECONDS)
        if options.shape == "tiny":
            os.environ |= {"ALTO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        prepare_environment(load_settings())
        import torch  # torch and MLflow read the environment when they are imported
        from eleven_bench import Bench

        if options.shape == "paper" and torch.cuda.device_count() < options.gpus:
            sys.exit(f"expected {options.gpus} GPUs, got {torch.cuda.device_count()}. --shape tiny needs none.")
        models = options.models or Path(folder) / "models"
        scale, rows = SCALES[options.shape], Path(folder)
        inputs = Inputs(scale, share=options.share, models=models, rows=rows, depth=options.depth)
        started = time.monotonic()
        inputs.write(ordered_cases())
        print(f"models and rows after {time.monotonic() - started:.0f} s", flush=True)
        log = options.out / "alto_up.log"
        gpus, ports = range(options.gpus), (free_port(), free_port())
        with running_host("eleven", gpus=gpus, ports=ports, log=log) as host:
            Bench(options, inputs, host, deadline).measure(options.variants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--shape", choices=SCALES, default="paper")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--share", type=float, help="of each data set's rows that a task trains on")
    parser.add_argument("--depth", type=float, default=1.0, help="share of each model's layers; bars are of whole ones")
    parser.add_argument("--seconds", type=float, default=1500.0, help="stop after so long, with what is measured")
    parser.add_argument("--models", type=Path, help="folder that keeps the models for a further call")
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "eleven_tasks")
        return
    deadline = time.monotonic() + options.seconds
    scale = SCALES[options.shape]
    options.share = options.share or scale.share
    if options.models is None and not scale.tiny_models and MEMORY.is_dir():
        options.models = MEMORY / "alto-eleven-models"
    measure(options, deadline)


if __name__ == "__main__":
    main()
