"""What the benchmark of adapter parallelism makes of its rows; the measurements themselves need minutes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from benchmarks.bench_adapter_parallel import Plan, bars, save
from benchmarks.kernel_bars import TARGETS


def test_rows_are_kept_as_they_come_and_ratios_are_of_useful_tokens(tmp_path: Path) -> None:
    plan = Plan("32b", "cpu", 2, 4096, (), tmp_path, tmp_path / "meeting", 0.0)
    measured = {
        ("ours", 1): 1.0,
        ("FSDP", 1): 4.0,
        ("FSDP, compiled", 1): 2.0,
        ("pipeline", 1): 3.0,
        ("ours, half of the layers", 1): 0.6,
        ("ours, half of the layers, whole", 1): 0.45,
        ("ours, half of the layers", 2): 0.5,
        ("ours, half of the layers, whole", 2): 0.5,
    }
    for (method, batch), seconds in measured.items():
        save(plan, method, batch, 2048 * batch, seconds, 1.5)
    save(plan, "ours", 1, 2048, 0.5, 1.5)  # again: in place of the first
    save(plan, "replicated, 1 ranks", 1, 2048, 1.0, 0.0)
    save(plan, "replicated, 2 ranks", 1, 4096, 1.1, 0.0)
    found = json.loads((tmp_path / "adapter_parallel.json").read_text())["bars"]
    assert found == pytest.approx(
        {
            "ap.over_fsdp_b1": 8.0,
            "ap.over_fsdp_fast_b1": 4.0,
            "ap.over_pipeline_b1": 6.0,
            "ap.exposed_gather_share": 0.25,
            "ap.replicated_scaling": 2 / 1.1,
        },
        rel=1e-3,
    )
    assert found.keys() <= TARGETS.keys()
    with (tmp_path / "adapter_parallel.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 and bars(rows[:1], "32b", 2) == {}
    others = bars(rows, "70b", 2)
    assert not others, "rows of another shape"
