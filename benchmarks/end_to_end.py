"""A whole task of 60 jobs through `alto tune`, without and with early exit, against PEFT one job after another.

    python benchmarks/end_to_end.py MODEL_FOLDER ROWS.jsonl --out FOLDER    # on a GPU
    python benchmarks/end_to_end.py --record FOLDER                         # anywhere: takes them into results/

The rows have the columns `question` and `answer`; 1,000 train and 128 validate. Every job makes three epochs and is
evaluated 27 times; tracking, checkpoints and the registry are on. A small task runs first, which profiles the model and
compiles kernels; its time stands beside, as what the first task on a machine takes longer. PEFT is timed eager over a
sample of steps and evaluations of each batch size at rank 32, rows padded to the longest of their batch, and scaled to
all jobs. FOLDER gets end_to_end.csv, end_to_end.json and the events of all runs, which are their raw logs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TRAIN_ROWS, VALIDATION_ROWS, EPOCHS, EVALUATIONS = 1000, 128, 3, 27
LEARNING_RATES = (1e-5, 5e-5, 2e-4, 3e-4, 5e-4)
RANKS = (16, 32, 64)
BATCH_SIZES = (1, 2, 4, 8)
FIRST_ROWS = 64
COLUMNS = ("run", "seconds", "training_seconds", "tracking_share", "samples_saved_share", "winner", "val_loss")


FIRST = "first on the machine"


def write_task(folder: Path, model: Path, rows: Path, name: str, limit: int, jobs: Mapping[str, Any]) -> Path:
    """A task file under a preset's name, or a small one; `jobs` narrows the search space."""
    is_first = name == FIRST
    space = {
        "learning_rate": list(LEARNING_RATES),
        "lora_rank": list(RANKS),
        "adapter_batch_size": list(BATCH_SIZES),
        **jobs,
        **({"learning_rate": [LEARNING_RATES[0]]} if is_first else {}),
    }
    task = {
        "name": "first" if is_first else f"sixty-jobs-{name}",
        "model": {"name": str(model.resolve())},
        "data": {
            "source": str(rows.resolve()),
            "columns": {"prompt": "question", "completion": "answer"},
            "limit": limit + VALIDATION_ROWS,
            "max_length": 512,
            "validation": {"rows": VALIDATION_ROWS},
        },
        "search_space": space,
        "budget": {"epochs": EPOCHS, "eval_interval_fraction": 1 / EVALUATIONS},
        "early_exit": {"preset": "none" if is_first else name},
    }
    file = folder / f"{task['name']}.yaml"
    file.write_text(json.dumps(task, indent=1), encoding="utf-8")  # JSON is YAML
    return file


def run_task(file: Path, out: Path) -> dict[str, Any]:
    """`alto tune`; its result object, with the seconds that the stages of training took."""
    environment = {**os.environ, "ALTO_HOME": str(out / "home")}
    command = [sys.executable, "-c", "from flows.cli.app import main; main()", "tune", str(file), "--json"]
    started = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    wall = time.monotonic() - started
    log = done.stdout.replace(str(out / "home"), "ALTO_HOME")
    (out / f"{file.stem}.events.jsonl").write_text(log, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"alto tune ended with exit code {done.returncode}")
    objects = [json.loads(line) for line in done.stdout.splitlines()]
    stages = [(o["at"], o["text"]) for o in objects if o["event"] == "stage"]
    return {**objects[-1], "wall_seconds": wall, "training_seconds": _training_seconds(stages)}


def _training_seconds(stages: Sequence[tuple[str, str]]) -> float:
    """From the beginning of the warmup to the beginning of the evaluation."""
    from datetime import datetime

    begun = {text.split()[-1]: datetime.fromisoformat(at) for at, text in stages}
    return (begun["evaluate"] - begun["warmup"]).total_seconds()


def peft_seconds(task: Path) -> dict[int, tuple[float, float]]:
    """Seconds of one update and of one evaluation of PEFT by batch size, on the task's own rows."""
    from alto_core.config import load_task
    from alto_core.preparation import plan_task

    loaded = load_task(task)
    data = plan_task(loaded).data
    return {size: _time_peft(loaded.model.name, size, data.train.rows, data.validation.rows) for size in BATCH_SIZES}


def _time_peft(model: str, batch_size: int, train: Sequence[Any], held_out: Sequence[Any]) -> tuple[float, float]:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=32, lora_alpha=64, target_modules=targets))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-4)

    def loss_of(part: Sequence[Any]) -> Any:
        length = max(len(row.token_ids) for row in part)
        pads = [length - len(row.token_ids) for row in part]
        labels = [
            [*(t if kept else -100 for t, kept in zip(row.token_ids, row.label_mask, strict=True)), *[-100] * pad]
            for row, pad in zip(part, pads, strict=True)
        ]
        padded = [[*row.token_ids, *[0] * pad] for row, pad in zip(part, pads, strict=True)]
        seen = [[1] * len(row.token_ids) + [0] * pad for row, pad in zip(part, pads, strict=True)]
        ids, mask, targets_ = (torch.tensor(values, device=device) for values in (padded, seen, labels))
        return adapted(input_ids=ids, attention_mask=mask, labels=targets_).loss

    def update(i: int) -> None:
        start = i * batch_size % (len(train) - batch_size + 1)
        loss = loss_of(train[start : start + batch_size])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapted.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    @torch.no_grad()
    def evaluate(_: int) -> None:
        for start in range(0, len(held_out), 8):
            loss_of(held_out[start : start + 8]).item()

    return _seconds(update, warm=3, count=20), _seconds(evaluate, warm=1, count=2)


def _seconds(call: Any, *, warm: int, count: int) -> float:
    for i in range(warm):
        call(i)
    times = []
    for i in range(count):
        started = time.perf_counter()
        call(warm + i)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(model: Path, rows: Path, out: Path, *, presets: Sequence[str], limit: int, jobs: Mapping[str, Any]) -> None:
    """The runs and the comparison; what is there is written down after each."""
    out.mkdir(parents=True, exist_ok=True)
    table, results = [], {}
    for preset in (FIRST, *presets):
        num_rows = min(limit, FIRST_ROWS) if preset == FIRST else limit
        result = run_task(write_task(out, model, rows, preset, num_rows, jobs), out)
        results[preset] = result
        winner = next(row for row in result["leaderboard"] if row["job_id"] == result["winner"])
        table.append(
            (preset, f"{result['wall_seconds']:.1f}", f"{result['training_seconds']:.1f}",
             f"{result['tracking_share']:.4f}", f"{result['samples_saved_share']:.4f}", result["winner"],
             f"{winner['best_val_loss']:.4f}")
        )  # fmt: skip
        _write(out, table, results, None)
        print(*table[-1], flush=True)
    if "guarded" not in results:
        return
    per_batch = peft_seconds(out / "sixty-jobs-guarded.yaml")
    num_jobs = {b: len(results["guarded"]["leaderboard"]) // len(BATCH_SIZES) for b in BATCH_SIZES}
    total = sum(
        num_jobs[b] * (EPOCHS * (limit // b) * update + EVALUATIONS * evaluation)
        for b, (update, evaluation) in per_batch.items()
    )
    table.append(("PEFT, one at a time (extrapolated)", f"{total:.0f}", f"{total:.0f}", "", "", "", ""))
    for batch_size, (update, evaluation) in per_batch.items():
        name = f"PEFT, batch {batch_size}: seconds of an update, of an evaluation"
        table.append((name, f"{update:.4f}", f"{evaluation:.4f}", "", "", "", ""))
    _write(out, table, results, total)
    print(f"PEFT {total:.0f} s: {total / results['guarded']['wall_seconds']:.1f} x with early exit", flush=True)


def _write(out: Path, table: Sequence[Any], results: Mapping[str, Any], peft_total: float | None) -> None:
    bars = {}
    if "none" in results:
        bars["engine.e2e_60_jobs_seconds"] = results["none"]["wall_seconds"]
        bars["engine.tracking_share"] = results["none"]["tracking_share"]
    if peft_total is not None:
        bars["engine.e2e_60_jobs_over_peft"] = peft_total / results["guarded"]["wall_seconds"]
    with (out / "end_to_end.csv").open("w", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerows([COLUMNS, *table])
    (out / "end_to_end.json").write_text(json.dumps({**_environment(), "bars": bars}, indent=1), encoding="utf-8")


def _environment() -> dict[str, str]:
    import torch

    if torch.cuda.is_available():
        from benchmarks.bench_lora_linear import environment

        return environment()
    return {"gpu": "none", "versions": f"torch {torch.__version__}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--presets", nargs="+", choices=("none", "guarded"), default=("none", "guarded"))
    parser.add_argument("--limit", type=int, default=TRAIN_ROWS, help="training rows, for a try")
    parser.add_argument("--jobs", type=json.loads, default={}, help="JSON that replaces parts of the search space")
    options = parser.parse_args()
    if options.record:
        from benchmarks.bars import RESULTS
        from benchmarks.kernel_bars import merge

        command = "python benchmarks/end_to_end.py MODEL_FOLDER ROWS.jsonl --out FOLDER"
        merge(options.record, "end_to_end", command)
        for log in options.record.glob("*.events.jsonl"):
            shutil.copy(log, RESULTS.parent / "end_to_end" / log.name)
        return
    measure(options.model, options.rows, options.out, presets=options.presets, limit=options.limit, jobs=options.jobs)


if __name__ == "__main__":
    main()
