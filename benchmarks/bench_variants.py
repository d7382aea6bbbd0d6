"""LoRA's variants side by side: time of a joint step, best validation loss at an equal budget, logits after export.

    python benchmarks/bench_variants.py --model FOLDER --rows gsm8k=FILE --rows reversal=FILE --out FOLDER
    python benchmarks/bench_variants.py --record FOLDER       # anywhere: takes variants.{csv,json} into results/

The model lies in a folder as the hub has it, the rows in JSON lines of `prompt`, `completion`;
examples/prepare_quickstart.py and benchmarks/early_exit_data.py write such. What has been measured is written as it
comes, and no step is begun after --minutes. Parts may be measured one by one (--parts), into one folder or several;
--device cpu with a tiny model takes seconds.

time     a joint step of jobs of one variant alone, on the first data set: plain LoRA of rank r, a probe's top half and
         quarter of the layers at ranks 2r and 4r (an equal number of trained parameters), the top half at rank r too,
         and TLoRA at 2r, whose A is frozen.
quality  per data set all variants, learning rates and seeds in the same joint steps. A variant's loss of a seed is the
         lowest validation loss over its learning rates and evaluations; over plain LoRA's of that seed it is the ratio,
         whose mean over seeds has a 95 % t-interval. A seed draws the initial adapters and the order of rows.
export   largest difference of any logit between the engine and PEFT on a row, each variant trained a few steps first.
         In float32 on the CPU.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from alto_core.budget import rows_of_step
from alto_core.config import DataSection, ModelSection, SplitSection
from alto_core.data.prepare import prepare_data
from alto_core.data.rows import TaskData, TokenRow
from alto_core.domain import JobBudget, LoraJob
from alto_core.engine.adapter_plan import LayerMeasure, adapted_names
from alto_core.engine.backbone import Backbone, load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.layer_probe import measure_layers
from alto_core.engine.target_modules import linear_endings
from alto_core.layer_measures import MEASURED_TOKENS

PARTS = ("time", "quality", "export")
PLAIN = "plain"
VARIANTS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    PLAIN: (1, {}),
    "probe_50": (2, {"layer_share": 0.5}),
    "probe_50_proportional": (2, {"layer_share": 0.5, "rank_allocation": "gradient"}),
    "probe_25": (4, {"layer_share": 0.25}),
    "tlora": (2, {"init": "tlora", "train": "b_only", "rank_allocation": "sensitivity"}),
    "pissa": (1, {"init": "pissa"}),
    "lora_plus": (1, {"lora_plus_ratio": 4.0}),
}
"""Rank over plain LoRA's, so that about as many parameters are trained, and the fields of its jobs."""
SAME_RANK = "probe_50_same_rank"
TIMED = {name: VARIANTS[name] for name in (PLAIN, "probe_50", "probe_25", "tlora")} | {
    SAME_RANK: (1, {"layer_share": 0.5})
}
EVAL_TOKENS, EXPORT_STEPS = 16384, 3
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % by the number of seeds."""
COLUMNS = ("row", "value", "low", "high", "unit", "what")
Found = dict[str, tuple[float, float, float, str, str]]
"""Value, interval (equal to it where there is none), unit, and what was measured, by row."""


@dataclass(kw_only=True)
class Bench:
    """What is measured on what, and what has come out."""

    backbone: Backbone
    targets: tuple[str, ...]
    options: argparse.Namespace
    deadline: float
    found: Found = field(default_factory=dict)

    @property
    def command(self) -> str:
        """To measure the same again."""
        parts = f"--parts {' '.join(self.options.parts)} --device {self.options.device}"
        return f"python benchmarks/bench_variants.py --model MODEL --rows NAME=FILE {parts} --out FOLDER"

    def save(self) -> None:
        """Write what has been measured so far."""
        from benchmarks.bench_lora_linear import environment

        out = self.options.out
        content = {**environment(), "bars": bars(self.found), "command": self.command, "found": self.found}
        (out / "variants.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        with (out / "variants.csv").open("w", newline="", encoding="utf-8") as target:
            writer = csv.writer(target, lineterminator="\n")
            writer.writerow(COLUMNS)
            for name, (value, low, high, unit, what) in self.found.items():
                writer.writerow((name, *(f"{number:.6g}" for number in (value, low, high)), unit, what))

    def note(self, name: str, values: Sequence[float], unit: str, how: str) -> None:
        """A figure with its interval over repetitions, on disk and on the screen."""
        value, low, high = mean_interval(values)
        what = f"{self.backbone.name}, {self.backbone.device.type}, plain rank {self.options.rank}, {how}"
        self.found[name] = (value, low, high, unit, what)
        print(f"   {name:40s} {value:.6g} [{low:.6g}, {high:.6g}] {unit}", flush=True)
        self.save()

    def is_over(self) -> bool:
        return time.perf_counter() > self.deadline

    def job(self, variant: tuple[int, Mapping[str, Any]], *, rate: float, seed: int) -> LoraJob:
        factor, fields = variant
        rank = factor * self.options.rank
        return LoraJob(
            learning_rate=rate,
            lora_rank=rank,
            lora_alpha=2.0 * rank,
            adapter_batch_size=self.options.batch,
            target_modules=self.targets,
            seed=seed,
            **fields,
        )

    @contextmanager
    def engine(self, jobs: Sequence[LoraJob], measures: Mapping[str, LayerMeasure]) -> Iterator[Engine]:
        """An engine that holds these jobs."""
        with Engine(
            self.backbone,
            target_modules=adapted_names(jobs, self.backbone.layers, measures),
            num_slots=len(jobs),
            rank_rows=sum(job.rank_rows for job in jobs),
            max_lora_rank=max(job.rank_rows for job in jobs),
            measures=measures,
        ) as engine:
            for job in jobs:
                engine.admit(job, JobBudget(total_steps=10**6, warmup_steps=1, eval_steps=(10**6,)))
            yield engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", action="append", default=[], metavar="NAME=FILE", help="once per data set")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=["time", "quality"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", type=int, default=16, help="of plain LoRA")
    parser.add_argument("--batch", type=int, default=4, help="rows of a job in a step")
    parser.add_argument("--rates", nargs="*", type=float, default=[1e-4, 5e-4, 2e-3])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=250, help="of each job")
    parser.add_argument("--evaluations", type=int, default=10, help="of each job")
    parser.add_argument("--validation-rows", type=int, default=100)
    parser.add_argument("--max-rows", type=int, default=2000, help="of a data set")
    parser.add_argument("--timed-jobs", type=int, default=16, help="side by side in a timed step")
    parser.add_argument("--timed-steps", type=int, default=20, help="of one of five rounds")
    parser.add_argument("--minutes", type=float, default=7.5)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "variants")
        return
    measure(options)


def measure(options: argparse.Namespace) -> Found:
    """Measure the parts that are asked for; what has been measured is written as it comes."""
    deadline = time.perf_counter() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    section = ModelSection(name=str(options.model.resolve()), dtype="float32" if "export" in options.parts else "auto")
    bench = Bench(
        backbone=load_backbone(section, options.device),
        targets=linear_endings(section),
        options=options,
        deadline=deadline,
    )
    tasks = {}
    for named in options.rows:
        name, _, file = named.partition("=")
        source = DataSection(
            source=str(Path(file).resolve()),
            limit=options.max_rows,
            validation=SplitSection(rows=options.validation_rows),
        )
        tasks[name] = prepare_data(source, section)
    first = next(iter(tasks.values()))
    for part in options.parts:
        started = time.perf_counter()
        match part:
            case "time":
                time_steps(bench, first)
            case "quality":
                for name, data in tasks.items():
                    compare_losses(bench, name, data)
            case "export":
                compare_logits(bench, first)
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
    for name, value in bars(bench.found).items():
        print(f"{name} {value:.6g}")
    return bench.found


def measured(bench: Bench, rows: Sequence[TokenRow]) -> dict[str, LayerMeasure]:
    """What a probe of the first rows tells of the layers."""
    chosen, tokens = [], 0
    for row in rows:
        tokens += len(row.token_ids)
        if chosen and tokens > MEASURED_TOKENS[bench.backbone.device.type]:
            break
        chosen.append(row)
    directions = max(
        bench.job(variant, rate=1.0, seed=0).trained_rows
        for variant in VARIANTS.values()
        if variant[1].get("init") == "tlora"
    )
    with Engine(bench.backbone, target_modules=bench.targets, num_slots=1, rank_rows=1, cuda_graph=False) as engine:
        return measure_layers(engine, bench.backbone.model, bench.targets, chosen, num_directions=directions)


def rows_at(jobs: Sequence[LoraJob], step: int, rows: Sequence[TokenRow]) -> dict[str, list[TokenRow]]:
    """Rows of each job's step, in the order that its seed draws."""
    return {
        job.job_id: [
            rows[i]
            for i in rows_of_step(
                step=step, num_train_rows=len(rows), rows_per_update=job.rows_per_update, seed=job.seed
            )
        ]
        for job in jobs
    }


def time_steps(bench: Bench, data: TaskData) -> None:
    """Milliseconds of a joint step of each timed variant, and plain LoRA's over them. Plain LoRA opens and closes."""
    rows, count, started = data.train.rows, bench.options.timed_steps, time.perf_counter()
    measures = measured(bench, rows)
    how = f"{bench.options.timed_jobs} jobs of batch {bench.options.batch}"
    bench.note("probe_seconds", [time.perf_counter() - started], "s", "a pass over the first rows, directions included")
    rounds: dict[str, list[float]] = {}
    for name in (*TIMED, PLAIN):
        if bench.is_over():
            return
        jobs = [bench.job(TIMED[name], rate=1e-5, seed=seed) for seed in range(bench.options.timed_jobs)]
        # Every variant passes over the same rows, so that all make passes of the same shapes.
        steps = [rows_at(jobs, step, rows) for step in range(1, 5)]
        with bench.engine(jobs, measures) as engine:
            for step in steps:
                engine.step(step)
            engine.take_records()
            for _ in range(5):
                started = time.perf_counter()
                for i in range(count):
                    engine.step(steps[i % len(steps)])
                engine.take_records()
                rounds.setdefault(name, []).append(1000 * (time.perf_counter() - started) / count)
    for name, times in rounds.items():
        bench.note(f"step.{name}", times, "ms", how)
    plain = statistics.median(rounds[PLAIN])
    for name, times in rounds.items():
        if name != PLAIN:
            bench.note(f"speedup.{name}", [plain / ms for ms in times], "ratio", how)


def compare_losses(bench: Bench, task: str, data: TaskData) -> None:
    """Train all variants at all rates and seeds together; note each one's losses and their ratios to plain LoRA's."""
    o = bench.options
    if bench.is_over():
        return
    by_variant = {
        name: [[bench.job(variant, rate=rate, seed=seed) for rate in o.rates] for seed in range(o.seeds)]
        for name, variant in VARIANTS.items()
    }
    jobs = [job for by_seed in by_variant.values() for of_seed in by_seed for job in of_seed]
    best = dict.fromkeys((job.job_id for job in jobs), math.inf)
    reached = 0
    with bench.engine(jobs, measured(bench, data.train.rows)) as engine:
        for step in range(1, o.steps + 1):
            if bench.is_over():
                break
            engine.step(rows_at(jobs, step, data.train.rows))
            if step % max(1, o.steps // o.evaluations) == 0 or step == o.steps:
                engine.take_records()
                losses = engine.evaluate(list(best), data.validation.rows, max_tokens=EVAL_TOKENS)
                best = {job_id: min(best[job_id], losses[job_id].mean) for job_id in best}
                reached = step
    print(f"   {task}: {reached} of {o.steps} steps of {len(jobs)} jobs", flush=True)
    if reached < o.steps:
        print("   cut short by --minutes: not noted")
        return
    lowest = {
        name: [min(best[job.job_id] for job in of_seed) for of_seed in by_seed] for name, by_seed in by_variant.items()
    }
    how = f"batch {o.batch}, {o.steps} steps, {o.seeds} seeds, rates {' '.join(f'{rate:g}' for rate in o.rates)}"
    for name, values in lowest.items():
        bench.note(f"loss.{task}.{name}", values, "nats", how)
        winners = [min(of_seed, key=lambda job: best[job.job_id]) for of_seed in by_variant[name]]
        bench.note(f"rate.{task}.{name}", [statistics.median(job.learning_rate for job in winners)], "", how)
        if name != PLAIN:
            ratios = [value / plain for value, plain in zip(values, lowest[PLAIN], strict=True)]
            bench.note(f"ratio.{task}.{name}", ratios, "ratio", how)


def compare_logits(bench: Bench, data: TaskData) -> None:
    """Largest difference of a logit between the engine and PEFT on the model as transformers loads it."""
    import peft
    import torch
    import transformers

    from benchmarks.export_round_trip import engine_logits

    # A scale that is no power of two, so that it is rounded wherever it is multiplied in.
    jobs = [
        dataclasses.replace(job, lora_alpha=1.3 * job.lora_rank)
        for job in (bench.job(variant, rate=1e-4, seed=0) for variant in VARIANTS.values())
    ]
    row, how = data.validation.rows[0], f"after {EXPORT_STEPS} steps at {jobs[0].learning_rate:g}"
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        with bench.engine(jobs, measured(bench, data.train.rows)) as engine:
            for step in range(1, EXPORT_STEPS + 1):
                with torch.enable_grad():
                    engine.step(rows_at(jobs, step, data.train.rows))
            engine.take_records()
            ours = []
            for job in jobs:
                engine.export(job.job_id, Path(temporary) / job.job_id, best=False)
                ours.append(engine_logits(engine, job, row))
        model = transformers.AutoModelForCausalLM.from_pretrained(bench.options.model, dtype=torch.float32).eval()
        ids = torch.tensor([row.token_ids])
        untuned = model(input_ids=ids).logits[0]
        for name, job, logits in zip(VARIANTS, jobs, ours, strict=True):
            tuned = peft.PeftModel.from_pretrained(model, Path(temporary) / job.job_id).eval()
            theirs = tuned(input_ids=ids).logits[0]
            bench.note(f"logit_diff.{name}", [float((logits - theirs).abs().max())], "logits", how)
            bench.note(f"logit_change.{name}", [float((theirs - untuned).abs().max())], "logits", how)
            model = tuned.unload()


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean with its 95 % t-interval; a single value is its own."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, mean, mean
    half = T_95.get(len(values), 1.96) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def bars(found: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """The figures of the table, as far as their parts were measured; of several data sets the worst."""
    made = {}
    if "speedup.probe_50" in found:
        made["variants.probe_step_speedup"] = found["speedup.probe_50"][0]
    for bar, variant in (("variants.probe_val_ratio", "probe_50"), ("variants.tlora_val_ratio", "tlora")):
        ratios = [row[0] for name, row in found.items() if name.startswith("ratio.") and name.endswith(f".{variant}")]
        if ratios:
            made[bar] = max(ratios)
    differences = [row[0] for name, row in found.items() if name.startswith("logit_diff.")]
    if differences:
        made["variants.export_max_logit_diff"] = max(differences)
    return made


if __name__ == "__main__":
    main()
