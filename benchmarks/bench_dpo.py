"""Preference tuning of a whole search space, through the engine, against DPO one job after the other.

    python benchmarks/bench_dpo.py --model FOLDER --pairs FILE --out FOLDER   # on a GPU: writes FOLDER/dpo.{csv,json}
    python benchmarks/bench_dpo.py --record FOLDER                            # anywhere: takes both into results/

The model lies in a folder as the hub has it, the pairs in JSON lines of `prompt`, `chosen`, `rejected`;
examples/prepare_quickstart.py and examples/prepare_preferences.py write such. Sixty jobs: five learning rates, ranks
16/32/64, 2 to 16 pairs a step, one epoch. Parts may be measured one by one (--parts); smaller settings run on a CPU.

sequential  PEFT and torch, as a user writes it: a policy pass and a pass with the adapter off for the reference, whole
            logits, fused AdamW; eager, and from a CUDA graph with every batch padded to the longest answer. Timed at
            one rank for every batch size, and taken for all steps of all jobs: extrapolated.
batched     all jobs in joint steps, the reference passed through again at every step; the extra pass is timed over
            some steps and taken for all of them: extrapolated. Prompts read once and twice per pair are timed as well.
quality     two whole runs, measured: without early exit and with it, the reference measured once. Evaluations count
            where early exit needs them. The winner is chosen on validation pairs and scored on test pairs.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dpo_setting import BETA, PRESETS, TARGETS, Setting, seconds_of, steps_of
from benchmarks.sequential_dpo import time_sequential

PARTS = ("sequential", "batched", "quality")
RATES, RANKS, BATCHES = (1e-5, 5e-5, 2e-4, 3e-4, 5e-4), (16, 32, 64), (2, 4, 8, 16)
GATE = 0.05
EVAL_TOKENS = 16384
COLUMNS = ("row", "what", "jobs", "train_pairs", "value", "unit")


@dataclasses.dataclass
class Run:
    """A whole training with some preset."""

    seconds: float
    step_seconds: float
    trained_pairs: int
    winner: Any
    test_scores: tuple[float, ...]
    untuned_scores: dict[str, float]
    likelihood: float
    state_counts: dict[str, int]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.test_scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", nargs="*", type=float, default=RATES)
    parser.add_argument("--ranks", nargs="*", type=int, default=RANKS)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--train-pairs", type=int, default=1000)
    parser.add_argument("--validation-pairs", type=int, default=200)
    parser.add_argument("--test-pairs", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one timing")
    parser.add_argument("--evaluations", type=int, default=20, help="of a job")
    parser.add_argument("--presets", nargs="*", choices=PRESETS, default=list(PRESETS), help="of the whole runs")
    options = parser.parse_args()
    if options.record:
        from benchmarks.kernel_bars import merge

        merge(options.record, "dpo", "python benchmarks/bench_dpo.py --model MODEL --pairs PAIRS --out FOLDER")
        return
    setting = Setting(
        model=options.model,
        pairs=options.pairs,
        device=options.device,
        jobs=make_jobs(options.rates, options.ranks, options.batches),
        train_pairs=options.train_pairs,
        validation_pairs=options.validation_pairs,
        test_pairs=options.test_pairs,
        seconds=options.seconds,
        evaluations=options.evaluations,
        presets=tuple(options.presets),
    )
    measure(setting, options.parts, options.out)


def make_jobs(rates: Sequence[float], ranks: Sequence[int], batches: Sequence[int]) -> tuple[Any, ...]:
    from alto_core.domain import LoraJob

    return tuple(
        LoraJob(
            learning_rate=rate,
            lora_rank=rank,
            lora_alpha=2.0 * rank,
            adapter_batch_size=batch,
            target_modules=TARGETS,
            beta=BETA,
        )
        for rate, rank, batch in itertools.product(rates, ranks, batches)
    )


def measure(setting: Setting, parts: Sequence[str], out: Path) -> None:
    """Measure some parts; what has been measured is written as it comes."""
    out.mkdir(parents=True, exist_ok=True)
    data = load_pairs(setting)
    found = earlier(setting, out)
    for part in parts:
        started = time.perf_counter()
        match part:
            case "sequential":
                steps: Iterable[dict[str, float]] = [time_sequential(setting, data)]
            case "batched":
                steps = [time_batched(setting, data)]
            case _:
                steps = whole_runs(setting, data)
        for figures in steps:
            found |= figures
            save(setting, found, out)
        print(f"{part}: {time.perf_counter() - started:.0f} s", flush=True)
    for name, value in {**found, **bars(found)}.items():
        print(f"   {name:40s} {value:.6g}", flush=True)


def save(setting: Setting, found: dict[str, float], out: Path) -> None:
    """Write what has been measured so far."""
    from benchmarks.bench_lora_linear import environment

    content = {**environment(), "bars": bars(found), "setting": repr(setting), "found": found}
    (out / "dpo.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    with (out / "dpo.csv").open("w", newline="", encoding="utf-8") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, value in found.items():
            unit = "s" if name.endswith("seconds") else ""
            writer.writerow((name, setting.model.name, len(setting.jobs), setting.train_pairs, f"{value:.6g}", unit))


def earlier(setting: Setting, out: Path) -> dict[str, float]:
    """What an earlier call measured of the same setting: parts may be measured one by one."""
    file = out / "dpo.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return dict(content["found"]) if content.get("setting") == repr(setting) else {}


def bars(found: dict[str, float]) -> dict[str, float]:
    """The figures of the table, as far as their parts have been measured."""
    eager, graphed = found.get("sequential_eager_seconds"), found.get("sequential_graphed_seconds")
    made = {}
    if "cached_seconds" in found and eager:
        made["dpo.with_reference_cache"] = eager / found["cached_seconds"]
        if "reference_share" in found:
            # Reference passes cost this share of a joint step's time, at every step.
            uncached = found["step_seconds"] * (1 + found["reference_share"])
            made["dpo.batched_over_sequential"] = eager / uncached
    if "early_exit_seconds" in found and eager:
        made["dpo.all_over_sequential"] = eager / found["early_exit_seconds"]
    if "early_exit_seconds" in found and graphed:
        made["dpo.all_over_graphed_sequential"] = graphed / found["early_exit_seconds"]
    if "accuracy_with_exit" in found and "accuracy_without_exit" in found:
        made["dpo.accuracy_ratio"] = found["accuracy_with_exit"] / found["accuracy_without_exit"]
    return made


def load_pairs(setting: Setting) -> Any:
    """Training, validation and test pairs of the model."""
    from alto_core.config import DataSection, ModelSection, SplitSection
    from alto_core.data.prepare import prepare_data

    section = DataSection(
        source=str(setting.pairs.resolve()),
        format="preference",
        limit=setting.train_pairs + setting.validation_pairs + setting.test_pairs,
        validation=SplitSection(rows=setting.validation_pairs),
        test=SplitSection(rows=setting.test_pairs),
    )
    data = prepare_data(section, ModelSection(name=str(setting.model.resolve())))
    print(data.report.as_text(), flush=True)
    return data


@contextmanager
def engine_over(setting: Setting, *, share_prompts: bool = True) -> Iterator[tuple[Any, dict[int, Any]]]:
    """An engine with a slot for every job, and its reference, empty."""
    from alto_core.config import ModelSection
    from alto_core.engine.backbone import load_backbone
    from alto_core.engine.engine import Engine
    from alto_core.engine.preference_objective import PreferenceObjective
    from alto_core.preference import PreferenceOptions

    backbone = load_backbone(ModelSection(name=str(setting.model.resolve())), setting.device)
    reference: dict[int, Any] = {}
    with Engine(
        dataclasses.replace(backbone, shares_prompts=share_prompts and backbone.shares_prompts),
        target_modules=TARGETS,
        num_slots=len(setting.jobs),
        rank_rows=sum(job.lora_rank for job in setting.jobs),
        max_lora_rank=max(job.lora_rank for job in setting.jobs),
        objective=PreferenceObjective(PreferenceOptions(), reference, beta=BETA),
    ) as engine:
        print(engine.prompt_note, flush=True)
        yield engine, reference


def measure_reference(engine: Any, reference: dict[int, Any], pairs: Sequence[Any]) -> None:
    sums = engine.side_losses("", pairs, max_tokens=EVAL_TOKENS).tolist()
    reference.update({pair.row_id: tuple(both) for pair, both in zip(pairs, sums, strict=True)})


def time_batched(setting: Setting, data: Any) -> dict[str, float]:
    """A joint step of all jobs, with prompts read once and twice per pair, and the reference pass over its rows."""
    from alto_core.budget import rows_of_step

    rows, found = data.train.rows, {}
    steps = []
    for number in range(4):
        picked = {
            job.job_id: rows_of_step(
                step=number % steps_of(job, data) + 1,
                num_train_rows=len(rows),
                rows_per_update=job.rows_per_update,
                seed=0,
            )
            for job in setting.jobs
        }
        steps.append({job_id: [rows[i] for i in indices] for job_id, indices in picked.items()})
    for share_prompts in (False, True):
        with engine_over(setting, share_prompts=share_prompts) as (engine, reference):
            measure_reference(engine, reference, rows)
            for job in setting.jobs:
                engine.admit(job, budget_of(setting, job, data))
            seconds = seconds_of(lambda i, engine=engine: engine.step(steps[i % 4]), setting)
            records = engine.take_records()
            assert all(record.train_loss == record.train_loss for record in records), "a loss is not a number"
            found[f"joint_step_prompts_read_{'once' if share_prompts else 'twice'}_seconds"] = seconds
            if share_prompts:
                found["reference_share"] = time_reference(setting, engine, steps) / seconds
    return found


def time_reference(setting: Setting, engine: Any, steps: Sequence[dict[str, Any]]) -> float:
    """Seconds of a forward pass of the frozen model over all rows of a joint step."""
    passed = [[row for part in step.values() for row in part] for step in steps]
    return seconds_of(lambda i: engine.side_losses("", passed[i % len(passed)], max_tokens=EVAL_TOKENS), setting)


def budget_of(setting: Setting, job: Any, data: Any) -> Any:
    from alto_core.budget import job_budget
    from alto_core.config import BudgetSection

    section = BudgetSection(epochs=1.0, eval_interval_fraction=1 / setting.evaluations, gate_warmup_fraction=GATE)
    return job_budget(job, section, len(data.train.rows))


def whole_runs(setting: Setting, data: Any) -> Iterator[dict[str, float]]:
    """Two whole trainings, one after the other: seconds, pairs trained on, accuracy of the winners on test pairs."""
    started = time.perf_counter()
    with engine_over(setting) as (engine, reference):
        measure_reference(engine, reference, [row for split in data.splits for row in split.rows])
        reference_seconds = time.perf_counter() - started
    yield {"reference_seconds": reference_seconds}
    for preset in setting.presets:
        name = PRESETS[preset]
        run = whole_run(setting, data, preset, reference)
        print(f"{preset}: {run.seconds:.1f} s, {run.state_counts}, winner {run.winner.job_id}", flush=True)
        found = {
            f"accuracy_{name}": run.accuracy,
            f"likelihood_accuracy_{name}": run.likelihood,
            f"trained_pairs_{name}": run.trained_pairs,
            f"run_{name}_seconds": run.seconds,
            **{f"untuned_{metric}": value for metric, value in run.untuned_scores.items()},
        }
        if preset == "none":
            found["step_seconds"] = run.step_seconds
            found["cached_seconds"] = run.step_seconds + reference_seconds
        else:
            found["early_exit_seconds"] = run.seconds + reference_seconds
        yield found


def whole_run(setting: Setting, data: Any, preset: str, known: dict[int, Any]) -> Run:
    """Train all jobs under a preset's rules, as the stages do it, without logging; then score the winner."""
    from collections import Counter

    from alto_core.domain import JobState
    from alto_core.early_exit.policy import gate_fractions, make_policy
    from alto_core.executor import Executor, JobRun
    from alto_core.recording import CurveRecorder

    policy = make_policy(preset, {})
    budgets = {job.job_id: budget_of(setting, job, data) for job in setting.jobs}
    recorder = CurveRecorder(setting.jobs, budgets)
    made = dict.fromkeys(budgets, 0)
    ended: dict[str, JobState] = {}
    shm = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=shm if shm.is_dir() and setting.device == "cuda" else None) as folder,
        engine_over(setting) as (engine, reference),
    ):
        reference.update(known)
        started = time.perf_counter()
        fractions = (1.0,) if preset == "none" else (*gate_fractions(policy, GATE, budgets.values()), 1.0)
        for fraction in fractions:
            stretches = [
                JobRun(
                    job=job,
                    budget=budgets[job.job_id],
                    folder=Path(folder) / job.job_id,
                    start_step=made[job.job_id],
                    target_step=budgets[job.job_id].step_at(fraction),
                )
                for job in setting.jobs
                if job.job_id not in ended and made[job.job_id] < budgets[job.job_id].step_at(fraction)
            ]
            session = Executor(engine, data, data_seed=0).run(stretches)
            boundary = next(session, None)
            while boundary is not None:
                recorder.add(boundary)
                made.update({record.job_id: record.step for record in boundary.steps})
                verdicts = []
                for job_id in boundary.running:
                    verdict = policy.judge(recorder.curve(job_id))
                    is_spent = made[job_id] >= budgets[job_id].total_steps
                    if verdict and not (is_spent and verdict.state is not JobState.DIVERGING):
                        verdicts.append(verdict)
                ended |= {verdict.job_id: verdict.state for verdict in verdicts}
                try:
                    boundary = session.send(verdicts)
                except StopIteration:
                    boundary = None
            if fraction < 1:
                curves = [dataclasses.replace(recorder.curve(job_id), ended=ended.get(job_id)) for job_id in budgets]
                ended |= {verdict.job_id: verdict.state for verdict in policy.gate(curves, fraction).verdicts}
        seconds = time.perf_counter() - started
        finished = [job for job in setting.jobs if ended.get(job.job_id) in (None, JobState.OVERFITTING)]
        winner = min(finished, key=lambda job: min(recorder.curve(job.job_id).val_losses))
        scores = score(engine, data, winner, Path(folder) / winner.job_id / "adapter")
    return Run(
        seconds=seconds,
        step_seconds=recorder.step_seconds,
        trained_pairs=sum(made[job.job_id] * job.rows_per_update for job in setting.jobs),
        winner=winner,
        test_scores=scores["preference"],
        untuned_scores={
            name.removeprefix("untuned_"): statistics.fmean(scores[name])
            for name in scores
            if name.startswith("untuned_")
        },
        likelihood=statistics.fmean(scores["preference_likelihood"]),
        state_counts=dict(Counter(str(ended.get(job.job_id, JobState.FINISHED)) for job in setting.jobs)),
    )


def score(engine: Any, data: Any, winner: Any, adapter: Path) -> dict[str, tuple[float, ...]]:
    """Scores of the winner's best adapter and of the untuned model on each test pair, by metric."""
    from alto_core.evaluation.intervals import mean_interval
    from alto_core.evaluation.preference import pair_scores

    engine.load_adapter(winner, adapter)
    losses = engine.evaluate([winner.job_id, ""], data.test.rows, max_tokens=EVAL_TOKENS)
    scores = {}
    for job_id, prefix in ((winner.job_id, ""), ("", "untuned_")):
        for metric in ("preference", "preference_likelihood"):
            scores[prefix + metric] = pair_scores(losses[job_id], metric)
            print(f"   {prefix}{metric}: {mean_interval(scores[prefix + metric])}", flush=True)
    return scores


if __name__ == "__main__":
    main()
