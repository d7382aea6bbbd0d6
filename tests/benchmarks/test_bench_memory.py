"""The memory benchmark in its smallest form on the CPU, and its arithmetic over joint steps."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from alto_core.scheduling.intra_task import Capacity, PackingPlan
from benchmarks.bench_memory import backfilled_share, joint_steps, measure, random_jobs, wave_share
from benchmarks.kernel_bars import TARGETS


def test_it_measures_every_bar_and_saves_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench_memory.PACKINGS", 2)
    measure(["tiny"], ["profile", "packings", "duration", "occupancy"], tmp_path, time.monotonic() + 100)
    found = json.loads((tmp_path / "memory.json").read_text())
    assert set(found["bars"]) == {"memory.error_p95", "memory.duration_error", "packing.occupancy"}
    assert set(found["bars"]) <= set(TARGETS)
    assert found["bars"]["packing.occupancy"] >= 0.92 > found["occupancy_without_backfill"]
    assert found["num_packings"] == 2
    assert len((tmp_path / "memory.csv").read_text().splitlines()) == 3


def test_shares_count_rows_while_jobs_wait() -> None:
    import random

    one, two, three = sorted(random_jobs(9, random.Random(0)), key=lambda job: -job.adapter_batch_size)[:3]
    assert one.adapter_batch_size == two.adapter_batch_size == three.adapter_batch_size == 4
    plan = PackingPlan(
        capacity=Capacity(num_slots=2, rank_rows=1000, step_tokens=80.0), max_pass_tokens=1, peak_bytes=0, too_large=()
    )
    a, b, c = (job.job_id for job in (one, two, three))
    used = joint_steps([a, b, a, b, a, a, c])
    assert used == [{a, b}, {a, b}, {a}, {a, c}]
    assert backfilled_share(used, [one, two, three], plan, 10.0) == pytest.approx((8 + 8 + 4) / 24)
    assert wave_share({a: 4, b: 2, c: 1}, [one, two, three], plan, 10.0) == pytest.approx((16 + 8) / 32)
