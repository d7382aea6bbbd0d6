"""What early exit saves and misses on recorded full sweeps: one table, three pictures, eight figures.

    python benchmarks/early_exit_evidence.py CURVES --fixed gsm8k-s0 chain_sum-s0 word_reversal-s0 --judged ...

CURVES holds what benchmarks/early_exit_sweep.py wrote. The constants of `guarded` were fixed on the sweeps under
`--fixed`; those under `--judged` were not looked at before. Each group is judged apart; a figure in bars.csv is the
worse of the two. One sweep is one draw: every policy is also replayed on random subsets of each sweep's jobs, as if the
search space had been another. Writes early_exit.csv, early_exit_ranking.csv and early_exit_resampled.csv,
docs/images/early-exit-*.svg, and the rows `exit.*` (preset `guarded`) and `paper.*` of results/bars.csv.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from bars import RESULTS, record_bar

from alto_core.curve_files import Recording, read_recording
from alto_core.early_exit import make_policy
from alto_core.replay import DEFAULT_WARMUP, ReplaySummary, replay_recording

POLICIES = ("paper", "guarded", "asha", "successive_halving", "median")
SUBSET_JOBS = 60
"""Of a sweep's 84, in a subset."""
REDUCTION_FACTORS = (2, 3, 4, 6, 8, 12)
LEAST_SCORE = 0.2
"""Best score from which a ratio of scores says anything."""
PICTURES = RESULTS.parents[2] / "docs" / "images"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """One recorded sweep."""

    name: str
    group: str
    """`fixed`: the constants were chosen on it; `judged`: they were not."""
    recording: Recording
    scores: Mapping[str, np.ndarray]
    """By job id, for each test row whether the answer was right; jobs that did not generate are missing."""
    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Downstream:
    """Test score of the adapter that a policy chose against that of the truly best by validation loss."""

    chosen: float
    best: float
    difference: float
    low: float
    """Of the paired 95 % interval of the difference."""
    high: float

    @property
    def ratio(self) -> float | None:
        return self.chosen / self.best if self.best >= LEAST_SCORE else None


def load(folder: Path, name: str, group: str) -> Sweep:
    table = pq.read_table(folder / f"{name}.scores.parquet").to_pandas().dropna(subset=["correct"])
    scores = {
        str(job_id): lines.sort_values("row")["correct"].to_numpy(dtype=float)
        for job_id, lines in table.groupby("job_id", observed=True)
    }
    facts = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    recording = read_recording(folder / f"{name}.parquet")
    if len(recording.jobs) != facts["num_jobs"]:
        raise SystemExit(f"{name}: {len(recording.jobs)} of {facts['num_jobs']} jobs are there; finish the sweep first")
    return Sweep(name=name, group=group, recording=recording, scores=scores, facts=facts)


def replayed(sweep: Sweep, preset: str, **constants: float) -> ReplaySummary:
    return replay_recording(
        sweep.recording, make_policy(preset, constants), warmup_fraction=DEFAULT_WARMUP, settings=constants
    )


def downstream(sweep: Sweep, summary: ReplaySummary) -> Downstream | None:
    """None where one of the two adapters was not scored, or is not the one that was."""
    by_id = {job.job_id: job for job in summary.jobs}
    if summary.chosen_job is None or summary.best_job is None:
        return None
    chosen = by_id[summary.chosen_job]
    same_adapter = chosen.best_val_loss == chosen.recorded_best_val_loss
    if not same_adapter or not {summary.chosen_job, summary.best_job} <= set(sweep.scores):
        return None
    a, b = sweep.scores[summary.chosen_job], sweep.scores[summary.best_job]
    difference = a - b
    error = float(difference.std(ddof=1) / math.sqrt(len(difference)))
    mean = float(difference.mean())
    return Downstream(
        chosen=float(a.mean()), best=float(b.mean()), difference=mean, low=mean - 1.96 * error, high=mean + 1.96 * error
    )


def asha_at_regret(points: Sequence[tuple[float, float]], regret: float) -> float:
    """Share of samples that asha saves at this regret, linear between its reduction factors, at the ends the nearest.

    Of points with equal regret the one that saves most counts; a larger regret never saves less than a smaller one.
    """
    best: dict[float, float] = {}
    for at, saved in points:
        best[at] = max(saved, best.get(at, 0.0))
    xs = sorted(best)
    return float(np.interp(regret, xs, np.maximum.accumulate([best[x] for x in xs])))


def table_row(sweep: Sweep, summary: ReplaySummary, asha_saved: float) -> dict[str, Any]:
    scores = downstream(sweep, summary)
    steps = sum(group["step_seconds"] for group in sweep.facts["groups"])
    evaluations = sum(group["evaluation_seconds"] for group in sweep.facts["groups"])
    return {
        "sweep": sweep.name,
        "group": sweep.group,
        "policy": summary.policy,
        "jobs": len(summary.jobs),
        "saved": summary.samples_saved_share,
        **{f"saved_{state}": share for state, share in summary.saved_by.items()},
        "asha_saved_at_equal_regret": asha_saved,
        "best_job": summary.best_job,
        "chosen_job": summary.chosen_job,
        "best_val_loss": summary.best_val_loss,
        "val_ratio": summary.val_loss_ratio,
        "regret": summary.regret,
        "regret_standard_error": summary.regret_standard_error,
        "miss_within_standard_error": summary.within_noise,
        "top_quarter_coverage": summary.top_quarter_coverage,
        "score_chosen": scores and scores.chosen,
        "score_best": scores and scores.best,
        "score_difference": scores and scores.difference,
        "score_low": scores and scores.low,
        "score_high": scores and scores.high,
        "score_ratio": scores and scores.ratio,
        "evaluation_share": evaluations / steps,
    }


def resampled(sweep: Sweep, num_subsets: int) -> list[dict[str, Any]]:
    """Each policy on the same random subsets of the jobs: how often it keeps the best, what it saves and misses."""
    draw_jobs = random.Random(0)
    jobs = sweep.recording.jobs
    size = min(SUBSET_JOBS, len(jobs))
    subsets = [
        dataclasses.replace(
            sweep, recording=dataclasses.replace(sweep.recording, jobs=tuple(draw_jobs.sample(jobs, size)))
        )
        for _ in range(num_subsets)
    ]
    rows = []
    for policy in POLICIES:
        done = [replayed(subset, policy) for subset in subsets]
        misses = [
            summary.regret / summary.regret_standard_error
            for summary in done
            if summary.regret and summary.regret_standard_error
        ]
        rows.append(
            {
                "sweep": sweep.name,
                "group": sweep.group,
                "policy": policy,
                "subsets": num_subsets,
                "jobs": size,
                "kept_share": sum(summary.within_noise for summary in done) / num_subsets,
                "saved": sum(summary.samples_saved_share for summary in done) / num_subsets,
                "regret_in_standard_errors": sum(misses) / num_subsets,
            }
        )
    return rows


def bar_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The four figures of one policy on one group of sweeps."""
    ratios = [1.0 if row["miss_within_standard_error"] else row["val_ratio"] or math.inf for row in rows]
    values = {
        "best_val_ratio_worst": max(ratios),
        "best_kept_share": sum(row["miss_within_standard_error"] for row in rows) / len(rows),
        "samples_saved_mean": sum(row["saved"] for row in rows) / len(rows),
    }
    scores = [row["score_ratio"] for row in rows if row["score_ratio"] is not None]
    return {**values, "downstream_ratio_worst": min(scores)} if scores else values


def record_bars(rows: Sequence[Mapping[str, Any]], sweeps: Sequence[Sweep], command: str) -> None:
    targets: dict[str, tuple[str, Callable[..., float]]] = {
        "best_val_ratio_worst": ("<= 1.002", max),
        "best_kept_share": ("= 1.0", min),
        "samples_saved_mean": (">= 0.65", min),
        "downstream_ratio_worst": (">= 0.99", min),
    }
    for prefix, policy in (("exit", "guarded"), ("paper", "paper")):
        by_group = [
            bar_values([row for row in rows if row["policy"] == policy and row["group"] == group])
            for group in sorted({sweep.group for sweep in sweeps})
        ]
        for name, (target, worse) in targets.items():
            measured = [values[name] for values in by_group if name in values]
            if measured:
                record_bar(
                    f"{prefix}.{name}",
                    worse(measured),
                    target=target,
                    command=command,
                    gpu=str(sweeps[0].facts["gpu"]),
                    versions=str(sweeps[0].facts["versions"]),
                )


def write_csv(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def draw(rows: Sequence[Mapping[str, Any]], ranking: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Early ranking against the end, samples saved by detector, and the ratio of best validation losses."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "alto"
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    sweeps = list(dict.fromkeys(row["sweep"] for row in rows))
    shown = ("paper", "guarded", "asha", "median")

    def save(figure: Any, name: str) -> None:
        figure.savefig(folder / f"early-exit-{name}.svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    for axis, key, title in zip(
        axes,
        ("spearman", "top_quarter_coverage"),
        ("rank correlation with the end", "true top quarter covered"),
        strict=True,
    ):
        for sweep in sweeps:
            lines = [row for row in ranking if row["sweep"] == sweep]
            axis.plot([100 * row["fraction"] for row in lines], [row[key] for row in lines], "o-", label=sweep)
        axis.set(xscale="log", xlabel="share of the budget (%)", title=title, ylim=(min(0, axis.get_ylim()[0]), 1.02))
        axis.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes[0].legend(fontsize=7)
    save(figure, "ranking")

    width = 0.8 / len(shown)
    figure, axis = plt.subplots(figsize=(9, 3.4))
    colors = {"underperforming": "#8c8c8c", "overfitting": "#e0a030", "diverging": "#c04040"}
    for i, policy in enumerate(shown):
        floor = np.zeros(len(sweeps))
        for state, color in colors.items():
            heights = [100 * row[f"saved_{state}"] for row in rows if row["policy"] == policy]
            at = np.arange(len(sweeps)) + (i - (len(shown) - 1) / 2) * width
            axis.bar(at, heights, width * 0.9, bottom=floor, color=color, label=state if i == 0 else None)
            floor = floor + heights
        for x, top in zip(np.arange(len(sweeps)) + (i - (len(shown) - 1) / 2) * width, floor, strict=True):
            axis.text(x, top + 1, policy, rotation=90, fontsize=6, ha="center", va="bottom")
    axis.set_xticks(np.arange(len(sweeps)), sweeps, fontsize=8)
    axis.set(ylabel="training rows saved (%)", ylim=(0, 118))
    axis.legend(fontsize=7, loc="upper right", ncols=3)
    save(figure, "saved")

    figure, axis = plt.subplots(figsize=(9, 3))
    for i, policy in enumerate(shown):
        ratios = [row["val_ratio"] or math.nan for row in rows if row["policy"] == policy]
        axis.plot(np.arange(len(sweeps)) + (i - 1.5) * 0.1, ratios, "o", label=policy)
    axis.axhline(1.002, linewidth=0.8, linestyle="--", color="grey")
    axis.set_xticks(np.arange(len(sweeps)), sweeps, fontsize=8)
    axis.set(ylabel="best validation loss,\nwith over without early exit")
    axis.legend(fontsize=7)
    save(figure, "ratio")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("curves", type=Path)
    parser.add_argument("--fixed", nargs="+", default=[], metavar="SWEEP")
    parser.add_argument("--judged", nargs="+", default=[], metavar="SWEEP")
    parser.add_argument("--out", type=Path, default=RESULTS.parent, help="folder of the tables")
    parser.add_argument("--pictures", type=Path, default=PICTURES)
    parser.add_argument("--subsets", type=int, default=40, help="random subsets of each sweep's jobs; 0 for none")
    parser.add_argument("--no-bars", action="store_true", help="leave results/bars.csv as it is")
    options = parser.parse_args(arguments)
    sweeps = [load(options.curves, name, group) for group in ("fixed", "judged") for name in getattr(options, group)]
    if not sweeps:
        parser.error("name at least one sweep after --fixed or --judged")
    rows, ranking = [], []
    for sweep in sweeps:
        tried = [replayed(sweep, "asha", reduction_factor=factor) for factor in REDUCTION_FACTORS]
        points = [(s.regret, s.samples_saved_share) for s in tried if s.regret is not None]
        for preset in POLICIES:
            summary = replayed(sweep, preset)
            equal = asha_at_regret(points, summary.regret) if summary.regret is not None else math.nan
            rows.append(table_row(sweep, summary, equal))
            print({k: v for k, v in rows[-1].items() if k in ("sweep", "policy", "saved", "val_ratio", "regret")})
        ranking += [{"sweep": sweep.name, **dataclasses.asdict(line)} for line in summary.agreement]
    write_csv(options.out / "early_exit.csv", rows)
    write_csv(options.out / "early_exit_ranking.csv", ranking)
    if options.subsets:
        lines = [line for sweep in sweeps for line in resampled(sweep, options.subsets)]
        write_csv(options.out / "early_exit_resampled.csv", lines)
    draw(rows, ranking, options.pictures)
    if not options.no_bars:
        groups = " ".join(f"--{g} {' '.join(getattr(options, g))}" for g in ("fixed", "judged") if getattr(options, g))
        record_bars(rows, sweeps, f"python benchmarks/early_exit_evidence.py CURVES {groups}")


if __name__ == "__main__":
    main()
