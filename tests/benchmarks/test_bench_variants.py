"""The benchmark of variants: budgets that are equal, figures from what was found, and a whole run on a tiny model."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks import bench_variants
from benchmarks.bench_variants import PLAIN, VARIANTS, bars, mean_interval
from benchmarks.kernel_bars import TARGETS


def test_figures_take_the_worst_data_set() -> None:
    found = {
        "speedup.probe_50": [1.2, 1.1, 1.3, "ratio"],
        "ratio.a.probe_50": [0.99, 0.9, 1.1, "ratio"],
        "ratio.b.probe_50": [1.02, 0.9, 1.1, "ratio"],
        "ratio.a.probe_50_proportional": [9.0, 9.0, 9.0, "ratio"],
        "ratio.a.tlora": [1.1, 1.0, 1.2, "ratio"],
        "logit_diff.plain": [1e-6, 1e-6, 1e-6, "logits"],
        "logit_diff.pissa": [3e-6, 3e-6, 3e-6, "logits"],
    }
    made = bars(found)
    assert made == {
        "variants.probe_step_speedup": 1.2,
        "variants.probe_val_ratio": 1.02,
        "variants.tlora_val_ratio": 1.1,
        "variants.export_max_logit_diff": 3e-6,
    }
    assert set(made) == {name for name in TARGETS if name.startswith("variants.")}
    assert bars({}) == {}


def test_intervals_are_students() -> None:
    assert mean_interval([2.0]) == (2.0, 2.0, 2.0)
    mean, low, high = mean_interval([1.0, 2.0, 3.0])
    assert (mean, high - mean) == (2.0, pytest.approx(4.303 / 3**0.5, rel=1e-3))
    assert low == pytest.approx(4.0 - high)


def test_variants_are_compared_on_a_tiny_model(
    tiny_model: Path, tiny_rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (
        f"--model {tiny_model} --rows letters={tiny_rows} --out {tmp_path / 'out'} --device cpu --parts time quality "
        "--rank 2 --batch 2 --seeds 2 --steps 2 --evaluations 1 --rates 1e-3 --validation-rows 4 --timed-jobs 1 "
        "--timed-steps 1"
    )
    monkeypatch.setattr(sys, "argv", ["bench_variants.py", *options.split()])
    bench_variants.main()
    content = json.loads((tmp_path / "out" / "variants.json").read_text())
    assert set(content["bars"]) == {name for name in TARGETS if name.startswith("variants.") and "logit" not in name}
    with (tmp_path / "out" / "variants.csv").open(newline="") as file:
        rows = {row["row"]: row for row in csv.DictReader(file)}
    assert {f"ratio.letters.{name}" for name in VARIANTS if name != PLAIN} < rows.keys()
    assert {f"loss.letters.{name}" for name in VARIANTS} < rows.keys()
    assert float(rows["speedup.probe_25"]["value"]) > 0
