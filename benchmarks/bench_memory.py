"""Memory model, forecast and backfill against what happens.

    python benchmarks/bench_memory.py --out FOLDER [--minutes 9] [--models 1b 8b] [--parts profile]   # on a GPU
    python benchmarks/bench_memory.py --record FOLDER       # anywhere: takes rows and bars into results/

profile    the grid of the profile stage: its time, its fits and their residuals
packings   random packings: predicted against measured peak (what the allocator handed out), backbone included
duration   a task without early exit: forecast after the profile against the real run, term by term
occupancy  sixty jobs with random exits where at most twelve fit: used share of the token budget while jobs wait,
           against waves of twelve without backfill

Random weights, rows of log-normal lengths. Everything is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PARTS = ("profile", "packings", "duration", "occupancy")
PACKINGS = 16
"""Of each model."""
COLUMNS = ("row", "model", "jobs", "rank_rows", "tokens", "labels", "predicted_gib", "measured_gib", "reserved_gib",
           "error")  # fmt: skip
MAX_TOKENS = {"tiny": 256, "1b": 24576, "8b": 8192}
MAX_JOBS = {"tiny": 4, "1b": 32, "8b": 16}
DURATION_SECONDS = {"tiny": 2.0, "1b": 60.0, "8b": 60.0}
"""Of the task whose duration is forecast."""
PLAN_SHARE = 0.9
"""Of the GPU's memory that a random packing may be predicted to take."""
EXIT_CHANCE = 0.25
"""That a job ends at an evaluation."""


def build(name: str) -> Any:
    """A backbone with random weights; `tiny` is on the CPU."""
    if name != "tiny":
        from benchmarks.bench_step import build_backbone

        return build_backbone(name)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from alto_core.engine.backbone import Backbone
    from alto_core.engine.packed_attention import PACKED_ATTENTION, register_packed_attention
    from alto_core.engine.target_modules import find_linear_layers

    register_packed_attention()
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=PACKED_ATTENTION,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return Backbone(
        model=model, device=torch.device("cpu"), dtype=torch.float32, name=name, layers=find_linear_layers(model),
        head=model.lm_head, takes_ragged_rows=False, shares_prompts=True, max_positions=None,
    )  # fmt: skip


def random_jobs(count: int, draw: random.Random, ranks: Sequence[int] = (8, 16, 32, 64)) -> list[Any]:
    from benchmarks.bench_step import make_jobs

    return [
        dataclasses.replace(job, lora_rank=draw.choice(ranks), adapter_batch_size=draw.choice((1, 2, 4)), seed=seed)
        for seed, job in enumerate(make_jobs(count, 1))
    ]


def rows_of(backbone: Any, count: int, seed: int) -> list[Any]:
    from benchmarks.bench_step import log_normal_lengths, make_rows

    lengths = log_normal_lengths(count, seed)
    if backbone.name == "tiny":
        lengths = [2 + length % 12 for length in lengths]
    return make_rows(count, backbone.model.config.vocab_size, lengths, seed=seed)


def random_data(train: Sequence[Any], held_out: Sequence[Any]) -> Any:
    """Task data of such rows."""
    from alto_core.data.report import DataReport
    from alto_core.data.rows import SplitData, TaskData

    report = DataReport(row_format="random", rows_read={}, splits=(), left_out=(), ignored_columns=(), notes=())
    return TaskData(
        train=SplitData(name="train", rows=tuple(train), generation_rows=()),
        validation=SplitData(name="validation", rows=tuple(held_out), generation_rows=()),
        test=None, digest="", report=report, stop_token_ids=(0,), pad_token_id=0,
        max_length=1024,
    )  # fmt: skip


def targets_of(jobs: Sequence[Any]) -> list[str]:
    return sorted({name for job in jobs for name in job.target_modules})


class Bench:
    """One model: its profile, then what is asked for.

    Args:
        name: of the model.
        out: where figures go.
        deadline: of `time.monotonic`; nothing is begun after it.
    """

    def __init__(self, name: str, out: Path, deadline: float):
        from alto_core.profiling import measure_grid, shape_of_backbone
        from alto_core.scheduling.memory_model import MemoryModel

        self.name, self._out, self._deadline = name, out, deadline
        self.backbone = build(name)
        jobs = random_jobs(8, random.Random(0))
        shape = shape_of_backbone(self.backbone, targets_of(jobs))
        self.profile = measure_grid(self.backbone, shape, jobs, rows_of(self.backbone, 64, 0))
        self.model = MemoryModel(shape=shape, fit=self.profile.memory)

    def note_profile(self) -> None:
        profile = self.profile
        save(self._out, {f"profile.{self.name}": json.loads(profile.to_json())})
        if self.name == "8b":
            save_bars(self._out, {"memory.profile_seconds_8b": profile.profile_seconds})
        print(
            f"{self.name} profile: {profile.profile_seconds:.1f} s, {len(profile.points)} points, "
            f"scale {profile.memory.scale:.3f}, fixed {profile.memory.fixed_bytes / 2**20:.0f} MiB, "
            f"residual {profile.memory.residual_bytes / 2**20:.0f} MiB, time {100 * profile.speed_residual:.1f} %\n"
            f"  {profile.speed}\n  {profile.costs}",
            flush=True,
        )

    def packings(self, count: int) -> list[float]:
        """Relative errors of predicted peaks; below 0 is too little."""
        errors: list[float] = []
        for seed in range(count):
            if time.monotonic() > self._deadline:
                break
            errors.append(self._packing(seed))
            gc.collect()
        return errors

    def _packing(self, seed: int) -> float:
        import torch

        from alto_core.engine.capture_choice import bucket
        from alto_core.profiling.measuring import peak_memory
        from benchmarks.bench_step import engine_with

        draw, on_gpu = random.Random(seed), self.backbone.device.type == "cuda"
        jobs = random_jobs(draw.randint(1, MAX_JOBS[self.name]), draw)
        rows = rows_of(self.backbone, 4 * len(jobs), seed)
        while True:
            step, size, tokens = self._step_of(jobs, rows, bucket if on_gpu else int)
            rank_rows = sum(job.lora_rank for job in jobs)
            predicted = self.model.peak_bytes(rank_rows=rank_rows, size=size)
            limit = PLAN_SHARE * torch.cuda.mem_get_info()[1] if on_gpu else 2**40
            if len(jobs) == 1 or (tokens <= MAX_TOKENS[self.name] and predicted <= limit):
                break
            jobs = jobs[: max(1, len(jobs) * 3 // 4)]
        options = {"max_pass_tokens": 2**30, "max_row_tokens": max(len(row.token_ids) for row in rows)}
        device = self.backbone.device
        with peak_memory(device) as peak, engine_with(self.backbone, jobs, **options) as engine:
            for _ in range(2):
                engine.step(step)
            engine.take_records()
        measured = self.model.shape.backbone_bytes + peak[0]
        reserved = torch.cuda.max_memory_reserved() if on_gpu else measured
        error = predicted / measured - 1
        row = (f"{self.name}_{seed}", self.name, len(jobs), rank_rows, tokens, size.labels, f"{predicted / 2**30:.3f}",
               f"{measured / 2**30:.3f}", f"{reserved / 2**30:.3f}", f"{error:.4f}")  # fmt: skip
        append_row(self._out, row)
        print(*row, flush=True)
        return error

    def _step_of(self, jobs: Sequence[Any], rows: Sequence[Any], rounded: Any) -> tuple[Mapping[str, Any], Any, int]:
        from alto_core.scheduling.memory_model import PassSize

        step, start = {}, 0
        for job in jobs:
            step[job.job_id] = rows[start : start + job.adapter_batch_size]
            start += job.adapter_batch_size
        tokens = sum(len(row.token_ids) for part in step.values() for row in part)
        size = PassSize(
            tokens=rounded(tokens),
            labels=sum(row.num_labels for part in step.values() for row in part),
            lora_rank=max(job.lora_rank for job in jobs),
        )
        return step, size, tokens

    def duration(self, seconds: float) -> tuple[float, float]:
        """Forecast and real seconds of a task without exits that is forecast to take about so long; both are saved."""
        from alto_core.profiling import TaskAhead, forecast_task

        jobs, data = random_jobs(12, random.Random(1), (8, 16)), self._data()
        plan, costs = self._plan(jobs, slots=6), self.profile.costs.once_loaded(is_compiled=True)

        def forecast(steps: int, costs: Any = costs) -> Any:
            budgets = {job.job_id: budget_of(steps, evaluations=2) for job in jobs}
            ahead = TaskAhead(
                data=data, data_seed=0, jobs=jobs, budgets=budgets, plan=plan, shape=self.model.shape
            )  # fmt: skip
            return forecast_task(ahead, self.profile.speed, costs, savings=0.0, gate_fraction=0.0).terms

        trial = forecast(200)
        by_steps = (trial.training + trial.evaluation) / 200
        steps = max(4, round((seconds - (trial.total - 200 * by_steps)) / by_steps))
        predicted = forecast(steps)
        counted = dataclasses.replace(costs, capture_seconds=1.0, evaluation_capture_seconds=1.0)
        captures = {"predicted": forecast(steps, counted).captures}
        save(self._out, {"duration": {"steps": steps, "predicted": dataclasses.asdict(predicted), **captures}})
        started = time.perf_counter()
        trained = self._train(jobs, data, plan, steps, evaluations=2, exit_chance=0.0)
        real = time.perf_counter() - started
        captures |= {"real": [dataclasses.astuple(one)[1:] for one in trained.captures]}
        found = {**trained.terms, "rest": real - sum(trained.terms.values())}
        terms = {"predicted": dataclasses.asdict(predicted), "real": found}
        save(self._out, {"duration": {"steps": steps, **terms, "captures": captures}})
        for name, value in found.items():
            print(f"  {name:<12}{terms['predicted'].get(name, 0.0):9.2f} s{value:9.2f} s", flush=True)
        print(f"  captures: {captures['predicted']:.0f}, really {len(trained.captures)}; {steps} steps", flush=True)
        return predicted.total, real

    def occupancy(self, num_jobs: int = 60, steps: int = 24) -> tuple[float, float]:
        """Used share of the token budget until the queue is empty: with backfill, and in waves without."""
        from alto_core.profiling import TaskRows

        jobs, data = random_jobs(num_jobs, random.Random(2), (8, 16)), self._data()
        smallest = min(job.adapter_batch_size for job in jobs)
        plan = self._plan(jobs, slots=12, tokens_of=12 * smallest)
        used = self._train(jobs, data, plan, steps, evaluations=8, exit_chance=EXIT_CHANCE).used
        made = {job.job_id: sum(job.job_id in step for step in used) for job in jobs}
        mean_row = TaskRows.of(data).mean
        return backfilled_share(used, jobs, plan, mean_row), wave_share(made, jobs, plan, mean_row)

    def _data(self) -> Any:
        return random_data(rows_of(self.backbone, 256, 3), rows_of(self.backbone, 16, 4))

    def _plan(self, jobs: Sequence[Any], *, slots: int, tokens_of: int | None = None) -> Any:
        """The packing of a GPU that has room for so many jobs, or rows."""
        from alto_core.engine.engine import PASS_TOKENS
        from alto_core.profiling import TaskRows
        from alto_core.scheduling.intra_task import Capacity, PackingPlan

        mean = TaskRows.of(self._data()).mean
        widest = sorted((job.lora_rank for job in jobs), reverse=True)[:slots]
        largest = sorted((job.adapter_batch_size for job in jobs), reverse=True)[:slots]
        tokens = mean * (tokens_of or sum(largest))
        return PackingPlan(
            capacity=Capacity(num_slots=slots, rank_rows=sum(widest), step_tokens=tokens),
            max_pass_tokens=PASS_TOKENS[self.backbone.device.type],
            peak_bytes=0,
            too_large=(),
        )

    def _train(
        self, jobs: Sequence[Any], data: Any, plan: Any, steps: int, *, evaluations: int, exit_chance: float
    ) -> Trained:
        """Train the jobs."""
        from alto_core.checkpointing import Checkpointer
        from alto_core.domain import JobState, Verdict
        from alto_core.executor import Executor, JobRun

        budget = budget_of(steps, evaluations)
        draw, done, checkpoints = random.Random(5), [], Checkpointer()
        step_seconds = evaluation_seconds = 0.0
        opened = time.perf_counter()
        with (
            tempfile.TemporaryDirectory() as folder,
            timed_engine(
                self.backbone,
                target_modules=targets_of(jobs),
                num_slots=plan.capacity.num_slots,
                rank_rows=plan.capacity.rank_rows,
                max_lora_rank=max(job.lora_rank for job in jobs),
                max_pass_tokens=plan.max_pass_tokens,
                max_row_tokens=max(len(row.token_ids) for row in data.train.rows),
            ) as engine,
        ):
            opening = time.perf_counter() - opened
            runs = [
                JobRun(job=job, budget=budget, folder=Path(folder) / job.job_id, start_step=0, target_step=steps)
                for job in jobs
            ]
            executor = Executor(
                engine, data, data_seed=0, step_tokens=plan.capacity.step_tokens, checkpoints=checkpoints
            )  # fmt: skip
            session = executor.run(runs)
            boundary = next(session, None)
            while boundary is not None:
                step_seconds += boundary.step_seconds
                evaluation_seconds += boundary.evaluation_seconds
                done.extend(record.job_id for record in boundary.steps)
                verdicts = [
                    Verdict(job_id=e.job_id, state=JobState.OVERFITTING, step=e.step, reason="", evidence={})
                    for e in boundary.evaluations
                    if e.step < steps and draw.random() < exit_chance
                ]
                try:
                    boundary = session.send(verdicts)
                except StopIteration:
                    break
            captures = engine.take_capture_times()
        while_training = [one for one in captures if one.kind.value != "losses"]
        compiling = sum(one.compile_seconds for one in captures)
        terms = {
            "training": step_seconds - sum(one.seconds for one in while_training),
            "evaluation": evaluation_seconds - sum(one.seconds for one in captures if one not in while_training),
            "captures": sum(one.seconds for one in captures) - compiling,
            "compilation": compiling,
            "checkpoints": checkpoints.held_seconds + engine.export_seconds,
            "start": opening + engine.admit_seconds,
        }
        return Trained(used=joint_steps(done), terms=terms, captures=captures)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a training run did."""

    used: list[set[str]]
    """Ids of the jobs that took part in each joint step."""
    terms: dict[str, float]
    """Seconds."""
    captures: tuple[Any, ...]


def timed_engine(backbone: Any, **options: Any) -> Any:
    """An engine that knows how long it admitted and exported."""
    from alto_core.engine.engine import Engine

    class TimedEngine(Engine):
        admit_seconds = export_seconds = 0.0

        def admit(self, *args: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            super().admit(*args, **kwargs)
            self.admit_seconds += time.perf_counter() - started

        def export(self, *args: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            super().export(*args, **kwargs)
            self.export_seconds += time.perf_counter() - started

    return TimedEngine(backbone, **options)


def budget_of(steps: int, evaluations: int) -> Any:
    """Of a job that is evaluated about so often."""
    from alto_core.domain import JobBudget

    every = max(1, steps // evaluations)
    marks = tuple(sorted({*range(every, steps, every), steps}))
    return JobBudget(total_steps=steps, warmup_steps=marks[0], eval_steps=marks)


def joint_steps(job_ids: Sequence[str]) -> list[set[str]]:
    """Records of joint steps in a row, cut where a job comes again."""
    steps: list[set[str]] = []
    for job_id in job_ids:
        if not steps or job_id in steps[-1]:
            steps.append(set())
        steps[-1].add(job_id)
    return steps


def backfilled_share(used: Sequence[set[str]], jobs: Sequence[Any], plan: Any, mean_row: float) -> float:
    """Mean used share of the token budget over the joint steps before the last job was admitted."""
    rows = {job.job_id: job.adapter_batch_size for job in jobs}
    first = {job_id: i for i, step in reversed(list(enumerate(used))) for job_id in step}
    while_waiting = used[: max(first.values())]
    budget = plan.capacity.step_tokens / mean_row
    return sum(sum(rows[job_id] for job_id in step) for step in while_waiting) / (budget * len(while_waiting))


def wave_share(made: Mapping[str, int], jobs: Sequence[Any], plan: Any, mean_row: float) -> float:
    """The same if a slot stays empty until all jobs of its wave have ended, over all waves but the last."""
    waiting = sorted(jobs, key=lambda job: -job.adapter_batch_size)
    budget = plan.capacity.step_tokens / mean_row
    used = available = 0.0
    while waiting:
        wave, rows = [], 0
        while waiting and len(wave) < plan.capacity.num_slots and rows + waiting[0].adapter_batch_size <= budget + 1e-6:
            rows += waiting[0].adapter_batch_size
            wave.append(waiting.pop(0))
        if waiting:
            used += sum(made[job.job_id] * job.adapter_batch_size for job in wave)
            available += budget * max(made[job.job_id] for job in wave)
    return used / available if available else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", default=["1b", "8b"], help="1b, 8b, or tiny on the CPU")
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--minutes", type=float, default=9.0, help="no packing or part is begun after so long")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "memory")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    measure(options.models, options.parts, options.out, time.monotonic() + 60 * options.minutes)


def measure(models: Sequence[str], parts: Sequence[str], out: Path, deadline: float) -> None:
    """Duration and occupancy are measured on the first model; the others have their profile and packings."""
    errors: list[float] = []
    for name in models:
        if time.monotonic() > deadline:
            break
        bench = Bench(name, out, deadline)
        bench.note_profile()
        if "duration" in parts and name == models[0]:
            predicted, real = bench.duration(DURATION_SECONDS[name])
            save_bars(out, {"memory.duration_error": abs(predicted / real - 1)})
            print(f"{name} duration: predicted {predicted:.1f} s, real {real:.1f} s", flush=True)
        if "occupancy" in parts and name == models[0]:
            with_backfill, in_waves = bench.occupancy()
            save_bars(out, {"packing.occupancy": with_backfill})
            save(out, {"occupancy_without_backfill": in_waves})
            print(f"{name} occupancy: {with_backfill:.3f}, in waves {in_waves:.3f}", flush=True)
        if "packings" in parts:
            errors += bench.packings(PACKINGS)
            absolute = sorted(abs(error) for error in errors)
            save_bars(out, {"memory.error_p95": absolute[min(len(absolute) - 1, int(0.95 * len(absolute)))]})
            save(out, {"lowest_error": min(errors), "num_packings": len(errors)})
        del bench
        gc.collect()


def save_bars(out: Path, bars: Mapping[str, float]) -> None:
    known = _known(out)
    save(out, {"bars": {**known.get("bars", {}), **bars}})


def save(out: Path, content: Mapping[str, Any]) -> None:
    from benchmarks.bench_lora_linear import environment

    file = out / "memory.json"
    file.write_text(json.dumps({**_known(out), **content, **environment()}, indent=1), encoding="utf-8")


def append_row(out: Path, row: Sequence[Any]) -> None:
    is_new = not (out / "memory.csv").exists()
    with (out / "memory.csv").open("a", newline="", encoding="utf-8") as target:
        csv.writer(target, lineterminator="\n").writerows([*([COLUMNS] if is_new else []), row])


def _known(out: Path) -> dict[str, Any]:
    file = out / "memory.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"bars": {}}


if __name__ == "__main__":
    main()
