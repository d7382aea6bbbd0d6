"""One full sweep without early exit, the truth that policies are judged by: every job of the paper's space to its end.

    python benchmarks/early_exit_sweep.py gsm8k --model MODEL --data FOLDER --out RESULTS --minutes 8

FOLDER comes from benchmarks/early_exit_data.py. Runs the product's own executor with the preset `none`, group by group
of equal batch size. After each group RESULTS/NAME.parquet and NAME.rows.parquet (curves, see docs/early-exit.md),
NAME.scores.parquet (held-out test rows: `job_id, row, loss_sum, num_tokens, correct`) and NAME.json (machine, times)
are written whole; jobs that stand there already are not trained again, so a sweep can be spread over several runs. A
group is begun only if, by the one before, it will be through in time; the first of a run is begun in any case, and lost
if it is not: `--group-jobs` makes groups smaller.

Needs torch, transformers, pydantic, pyyaml, numpy, pyarrow and psutil; no MLflow, no Prefect. TF32 stays off.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from early_exit_scores import SCHEMA, score_adapters

from alto_core.budget import job_budget
from alto_core.config import BudgetSection, DataSection, ModelSection, SplitSection
from alto_core.curve_files import CurveRows, read_recording, write_recording
from alto_core.data.prepare import prepare_data
from alto_core.data.rows import TaskData
from alto_core.data.tokenizer import load_model_tokenizer
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.backbone import Backbone, load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.target_modules import linear_endings
from alto_core.executor import Executor, JobRun
from alto_core.recording import CurveRecorder, record_training

LEARNING_RATES = (1e-5, 5e-5, 2e-4, 3e-4, 5e-4, 2e-3, 1e-2)
"""The paper's five, and two above them at which jobs diverge or overfit."""
LORA_RANKS = (16, 32, 64)
BATCH_SIZES = (8, 4, 2, 1)
EPOCHS = 3
MAX_EVAL_TOKENS = 32768


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What all groups share."""

    data: TaskData
    backbone: Backbone
    modules: tuple[str, ...]
    budgets: dict[str, JobBudget]
    seed: int
    deadline: float

    def engine(self, jobs: Sequence[LoraJob]) -> Engine:
        """Slots for these jobs."""
        return Engine(
            self.backbone,
            target_modules=self.modules,
            num_slots=len(jobs),
            rank_rows=sum(job.lora_rank for job in jobs),
            max_lora_rank=max(job.lora_rank for job in jobs),
            max_row_tokens=max(len(row.token_ids) for split in self.data.splits for row in split.rows),
        )


def make_jobs(modules: Sequence[str], seed: int, options: argparse.Namespace) -> list[LoraJob]:
    """Large batches first: their groups take the least time."""
    return [
        LoraJob(
            learning_rate=rate,
            lora_rank=rank,
            lora_alpha=2 * rank,
            adapter_batch_size=size,
            weight_decay=0.01,
            target_modules=tuple(modules),
            seed=seed,
        )
        for size in options.batch_sizes
        for rate in options.learning_rates
        for rank in options.lora_ranks
    ]


def groups(jobs: Sequence[LoraJob], group_jobs: int | None) -> Iterator[list[LoraJob]]:
    """Jobs of equal batch size, at most so many together."""
    for size in sorted({job.adapter_batch_size for job in jobs}, reverse=True):
        same = [job for job in jobs if job.adapter_batch_size == size]
        step = group_jobs or len(same)
        yield from (same[start : start + step] for start in range(0, len(same), step))


def train_group(sweep: Sweep, jobs: Sequence[LoraJob], folder: Path) -> CurveRecorder:
    """Train a group to the end of its budgets.

    Raises:
        TimeoutError: the deadline has passed.
    """
    recorder = CurveRecorder(jobs, sweep.budgets)
    stretches = [
        JobRun(
            job=job,
            budget=sweep.budgets[job.job_id],
            folder=folder / job.job_id,
            start_step=0,
            target_step=sweep.budgets[job.job_id].total_steps,
        )
        for job in jobs
    ]
    with sweep.engine(jobs) as engine:
        executor = Executor(engine, sweep.data, data_seed=sweep.seed, max_eval_tokens=MAX_EVAL_TOKENS)
        record_training(executor, stretches, recorder, deadline=sweep.deadline)
    return recorder


def save(out: Path, name: str, curves: list[CurveRows], scores: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    write_recording(out / f"{name}.parquet", curves, compact=True)
    pq.write_table(pa.Table.from_pylist(scores, schema=SCHEMA), out / f"{name}.scores.parquet", compression="zstd")
    (out / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def earlier(have: Path, name: str) -> tuple[list[CurveRows], list[dict[str, Any]], dict[str, Any]]:
    """What runs before this one have saved."""
    if not (have / f"{name}.json").is_file():
        return [], [], {}
    recorded = [
        CurveRows(curve=job.curve, lora_rank=job.lora_rank, adapter_batch_size=job.adapter_batch_size)
        for job in read_recording(have / f"{name}.parquet").jobs
    ]
    scores = pq.read_table(have / f"{name}.scores.parquet").to_pylist()
    return recorded, scores, json.loads((have / f"{name}.json").read_text(encoding="utf-8"))


def run(options: argparse.Namespace) -> int:
    """Returns the exit code: 0 when the sweep is whole, 3 when jobs are left."""
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ModelSection(name=str(options.model))

    def split(part: str, rows: int | None) -> SplitSection:
        return SplitSection(source=str(options.data / f"{options.dataset}.{part}.jsonl"), rows=rows)

    data = prepare_data(
        DataSection(
            source=str(options.data / f"{options.dataset}.train.jsonl"),
            limit=options.train_rows,
            validation=split("validation", options.validation_rows),
            test=split("test", options.test_rows),
            seed=options.seed,
        ),
        model,
    )
    modules = tuple(sorted(linear_endings(model)))
    jobs = make_jobs(modules, options.seed, options)
    budget = BudgetSection(epochs=EPOCHS, eval_interval_fraction=options.eval_interval)
    budgets = {job.job_id: with_early_evaluations(job_budget(job, budget, len(data.train.rows))) for job in jobs}
    sweep = Sweep(
        data=data,
        backbone=load_backbone(model, device),
        modules=modules,
        budgets=budgets,
        seed=options.seed,
        deadline=started + 60 * options.minutes,
    )
    tokenizer = load_model_tokenizer(model).tokenizer
    name = options.name or f"{options.dataset}-s{options.seed}"
    options.out.mkdir(parents=True, exist_ok=True)
    curves, scores, facts = earlier(options.have or options.out, name)
    there = {rows.curve.job_id for rows in curves}
    facts = {**facts, **machine_facts(device, data, options), "groups": facts.get("groups", [])}
    done_now: list[dict[str, Any]] = []
    for group in groups(jobs, options.group_jobs):
        left = [job for job in group if job.job_id not in there]
        if not left:
            continue
        steps = max(sweep.budgets[job.job_id].total_steps for job in left)
        seconds = expected_seconds(done_now[-1], steps, len(left)) if done_now else 0.0
        if time.monotonic() + seconds > sweep.deadline:
            print(f"{seconds:.0f} s are not left for batch size {left[0].adapter_batch_size}; run again", flush=True)
            return 3
        with tempfile.TemporaryDirectory() as temporary:
            before = time.monotonic()
            try:
                recorder = train_group(sweep, left, Path(temporary))
            except TimeoutError:
                print(f"out of time in the group of batch size {left[0].adapter_batch_size}; run again", flush=True)
                return 3
            trained = time.monotonic()
            scored = [job for job in left if (Path(temporary) / job.job_id / "adapter").is_dir()]
            with sweep.engine(scored) as engine:
                for job in scored:
                    engine.load_adapter(job, Path(temporary) / job.job_id / "adapter")
                scores += score_adapters(
                    engine,
                    data,
                    [job.job_id for job in scored],
                    decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
                    num_generating=options.score_top,
                    max_new_tokens=options.max_new_tokens,
                    max_eval_tokens=MAX_EVAL_TOKENS,
                )
        curves += [
            CurveRows(
                curve=recorder.curve(job.job_id), lora_rank=job.lora_rank, adapter_batch_size=job.adapter_batch_size
            )
            for job in left
        ]
        facts["groups"].append(
            {
                "batch_size": left[0].adapter_batch_size,
                "jobs": len(left),
                "steps": steps,
                "step_seconds": round(recorder.step_seconds, 2),
                "evaluation_seconds": round(recorder.evaluation_seconds, 2),
                "seconds": round(trained - before, 2),
                "scoring_seconds": round(time.monotonic() - trained, 2),
            }
        )
        done_now.append(facts["groups"][-1])
        save(options.out, name, curves, scores, facts)
        print(name, facts["groups"][-1], flush=True)
    return 0


def expected_seconds(before: dict[str, Any], steps: int, num_jobs: int) -> float:
    """At most, since a step with smaller batches takes no longer than one of the group before."""
    per_job = (before["evaluation_seconds"] + before["scoring_seconds"]) / before["jobs"]
    return float(steps * before["step_seconds"] / before["steps"] + num_jobs * per_job)


def with_early_evaluations(budget: JobBudget) -> JobBudget:
    """Also at the shares of the budget at which rankings are compared."""
    early = {budget.step_at(fraction) for fraction in (0.01, 0.02, 0.05, 0.1, 0.2)}
    return dataclasses.replace(budget, eval_steps=tuple(sorted({*budget.eval_steps, *early})))


def machine_facts(device: str, data: TaskData, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none",
        "versions": f"python {sys.version.split()[0]}; torch {torch.__version__}",
        "dataset": options.dataset,
        "seed": options.seed,
        "data_digest": data.digest,
        "train_rows": len(data.train.rows),
        "validation_rows": len(data.validation.rows),
        "test_rows": len(data.test.rows) if data.test else 0,
        "epochs": EPOCHS,
        "eval_interval": options.eval_interval,
        "num_jobs": len(options.learning_rates) * len(options.lora_ranks) * len(options.batch_sizes),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="name of the data set, as benchmarks/early_exit_data.py gives it")
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the JSONL files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--have", type=Path, help="folder of an earlier run's files, if not OUT")
    parser.add_argument("--name", help="name of the files; DATASET-sSEED when left out")
    parser.add_argument("--seed", type=int, default=0, help="of initial adapters, row order")
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--group-jobs", type=int, help="most jobs that train together")
    parser.add_argument("--eval-interval", type=float, default=0.02, help="share of a job's steps")
    parser.add_argument("--train-rows", type=int, default=1000)
    parser.add_argument("--validation-rows", type=int, default=128)
    parser.add_argument("--test-rows", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--score-top", type=int, default=12, help="jobs of a group, by test loss, that also generate")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=LEARNING_RATES)
    parser.add_argument("--lora-ranks", type=int, nargs="+", default=LORA_RANKS)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=BATCH_SIZES)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(run(parse()))
