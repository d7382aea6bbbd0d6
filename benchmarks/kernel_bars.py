"""Takes a GPU benchmark's rows and bars from the machine's output folder into results/."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from benchmarks.bars import RESULTS, record_bar

TARGETS = {
    "kernels.linear_4x192": "<= 1.40",
    "kernels.linear_32x192": "<= 1.20",
    "kernels.linear_4x768": "<= 1.22",
    "kernels.linear_32x768": "<= 1.15",
    "kernels.worst_over_best_other": "<= 1.02",
    "kernels.byte_floor_share_4k": ">= 0.6",
    "kernels.model_1b_b1": "<= 1.15",
    "kernels.model_1b_b2": "<= 1.13",
    "kernels.model_1b_b4": "<= 1.12",
    "kernels.model_1b_zipf": "<= 1.15",
    "kernels.model_8b_16": "<= 1.10",
    "kernels.adamw_bandwidth_share": ">= 0.6",
    "engine.ceiling_8b_16x1": ">= 0.55",
    "engine.ceiling_8b_16x2": ">= 0.58",
    "engine.ceiling_1b_32x1": ">= 0.45",
    "engine.ceiling_1b_32x4": ">= 0.50",
    "engine.ms_8b_1": "<= 22",
    "engine.ms_8b_2": "<= 32",
    "engine.ms_8b_4": "<= 58",
    "engine.ms_1b_1": "<= 6",
    "engine.ms_1b_4": "<= 12",
    "engine.over_peft_eager_b1": ">= 40",
    "engine.over_peft_eager_b2": ">= 25",
    "engine.over_peft_eager_b4": ">= 13",
    "engine.over_peft_graph_b1": ">= 3.7",
    "engine.over_peft_graph_b2": ">= 2.4",
    "engine.over_peft_graph_b4": ">= 1.8",
    "engine.packed_gain": "",
    "engine.e2e_60_jobs_seconds": "<= 245",
    "engine.e2e_60_jobs_over_peft": ">= 150",
    "engine.tracking_share": "<= 0.01",
    "evaluate.batched_over_single": ">= 8",
    "memory.error_p95": "<= 0.05",
    "memory.duration_error": "<= 0.10",
    "memory.profile_seconds_8b": "<= 60",
    "packing.occupancy": ">= 0.92",
    "dpo.batched_over_sequential": "",
    "dpo.with_reference_cache": "",
    "dpo.all_over_sequential": ">= 10",
    "dpo.all_over_graphed_sequential": ">= 4",
    "dpo.accuracy_ratio": ">= 0.99",
    "variants.probe_step_speedup": "1.15-1.28 in the paper",
    "variants.probe_val_ratio": "<= 1.01",
    "variants.tlora_val_ratio": "",
    "variants.export_max_logit_diff": "<= 1e-4",
    "ap.over_fsdp_b1": ">= 3",
    "ap.over_fsdp_b2": ">= 4.7",
    "ap.over_fsdp_b4": ">= 3",
    "ap.over_fsdp_b8": ">= 1.4",
    "ap.over_fsdp_fast_b1": "",
    "ap.over_fsdp_fast_b2": "",
    "ap.over_fsdp_fast_b4": "",
    "ap.over_fsdp_fast_b8": "",
    "ap.over_pipeline_b1": "",
    "ap.over_pipeline_b2": "",
    "ap.over_pipeline_b4": "",
    "ap.over_pipeline_b8": "",
    "ap.exposed_gather_share": "",
    "ap.replicated_scaling": ">= 1.95",
    "cluster8.all_over_b": ">= 5.2",
}


def merge(folder: Path, name: str, command: str | None = None) -> None:
    """Take in `name`.csv and the bars of `name`.json, each with the machine that measured it.

    Args:
        folder: what the benchmark wrote.
        name: of the files.
        command: that measured; None: the benchmark of that name.
    """
    measured = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    if (folder / f"{name}.csv").exists():
        _merge_rows(folder / f"{name}.csv", RESULTS.with_name(f"{name}.csv"))
    for bar, value in measured["bars"].items():
        record_bar(
            bar,
            value,
            target=TARGETS.get(bar, ""),  # bars of other shapes and numbers of ranks have none
            unit=_unit(bar),
            gpu=measured["gpu"],
            versions=measured["versions"],
            command=command or measured.get("command") or f"python benchmarks/bench_{name}.py --out FOLDER",
        )


def _unit(bar: str) -> str:
    if "logit" in bar:
        return "logits"
    return "ms" if ".ms_" in bar else "s" if "seconds" in bar else "ratio"


def _merge_rows(source: Path, target: Path) -> None:
    """New rows replace the old ones with the same first column; the others stay."""
    with source.open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    kept = []
    if target.exists():
        measured = {row[0] for row in rows}
        with target.open(newline="", encoding="utf-8") as file:
            kept = [row for row in list(csv.reader(file))[1:] if row[0] not in measured]
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *kept, *rows])
