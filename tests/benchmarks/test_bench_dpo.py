"""The figures of the preference benchmark from what it times."""

from __future__ import annotations

import pytest

from benchmarks.bench_dpo import BATCHES, RANKS, RATES, bars, make_jobs
from benchmarks.kernel_bars import TARGETS


def test_figures_compare_whole_searches() -> None:
    found = {
        "sequential_eager_seconds": 1000.0,
        "sequential_graphed_seconds": 400.0,
        "step_seconds": 40.0,
        "reference_share": 0.25,
        "cached_seconds": 45.0,
        "early_exit_seconds": 20.0,
        "accuracy_with_exit": 0.75,
        "accuracy_without_exit": 0.76,
    }
    made = bars(found)
    assert set(made) == {name for name in TARGETS if name.startswith("dpo.")}
    assert made["dpo.batched_over_sequential"] == pytest.approx(1000 / 50)
    assert made["dpo.with_reference_cache"] == pytest.approx(1000 / 45)
    assert made["dpo.all_over_sequential"] == pytest.approx(50)
    assert made["dpo.all_over_graphed_sequential"] == pytest.approx(20)
    assert made["dpo.accuracy_ratio"] == pytest.approx(0.75 / 0.76)
    # On the CPU nothing is captured, and a part alone gives no ratio.
    assert "dpo.all_over_graphed_sequential" not in bars({"early_exit_seconds": 20.0})


def test_sixty_jobs() -> None:
    jobs = make_jobs(RATES, RANKS, BATCHES)
    assert len({job.job_id for job in jobs}) == 60
