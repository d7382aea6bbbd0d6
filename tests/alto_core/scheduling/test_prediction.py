"""How long it takes: fits of speed, jobs played through slots, savings learned from past tasks. Pure values."""

from __future__ import annotations

import pytest

from alto_core import wording
from alto_core.scheduling.intra_task import Capacity, JobSize
from alto_core.scheduling.memory_model import MemoryFit, PassSize
from alto_core.scheduling.model_profile import GridPoint, ModelProfile
from alto_core.scheduling.prediction import (
    JobWork,
    PassSpeed,
    expected_savings,
    fit_speed,
    forecast,
    seconds_left,
)

SPEED = PassSpeed(base_seconds=0.0, seconds_per_token=0.01, eval_share=0.5)


def works(count: int, *, steps: int = 10, evaluations: int = 0) -> list[JobWork]:
    return [
        JobWork(
            size=JobSize(job_id=str(i), adapter_batch_size=1, lora_rank=8, row_tokens=100),
            steps=steps,
            evaluations=evaluations,
            tokens_per_step=100,
        )
        for i in range(count)
    ]


def seconds(made: list[JobWork], slots: int, *, speed: PassSpeed = SPEED, savings: float = 0.0, tokens: int = 0):
    capacity = Capacity(num_slots=slots, rank_rows=1000, step_tokens=100.0 * slots)
    return forecast(
        made, capacity, speed, max_pass_tokens=1000, validation_tokens=tokens, savings=savings, gate_fraction=0.05
    )


def test_speed_is_fitted_and_never_negative() -> None:
    fit = fit_speed([(100, 0.5 + 1.0), (400, 0.5 + 4.0), (1000, 0.5 + 10.0)])
    assert fit.base_seconds == pytest.approx(0.5) and fit.seconds_per_token == pytest.approx(0.01)
    falling = fit_speed([(100, 2.0), (200, 1.0)])
    assert falling.base_seconds >= 0 and falling.seconds_per_token >= 0
    single = fit_speed([(100, 2.0)])
    assert single.step_seconds(100, 1000) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="at least one"):
        fit_speed([])


def test_few_slots_take_the_same_time_where_time_goes_by_tokens_and_longer_where_passes_cost() -> None:
    assert seconds(works(6), 2).seconds == pytest.approx(60.0)
    assert seconds(works(6), 6).seconds == pytest.approx(60.0)
    costly = PassSpeed(base_seconds=1.0, seconds_per_token=0.01)
    assert seconds(works(6), 2, speed=costly).seconds == pytest.approx(60 + 30)
    assert seconds(works(6), 6, speed=costly).seconds == pytest.approx(60 + 10)


def test_waves_and_evaluations_are_counted() -> None:
    found = seconds(works(7, evaluations=3), 3, tokens=200)
    assert found.waves == 3
    assert found.seconds == pytest.approx(70 + 7 * 3 * 200 * 0.01 * 0.5)
    assert wording.forecast(found) == "about 1 min 31 s, 7 jobs in 3 waves"


def test_freed_slots_are_filled_at_once() -> None:
    mixed = [*works(3, steps=10), *[w for w in works(8, steps=20) if int(w.size.job_id) >= 3]]
    assert seconds(mixed, 2).occupancy == pytest.approx(1.0)


def test_early_exit_shortens_the_forecast_and_past_tasks_outweigh_the_prior() -> None:
    found = seconds(works(6), 2, savings=0.4)
    assert found.seconds == pytest.approx(36.0) and found.seconds_without_exit == pytest.approx(60.0)
    assert "if none ends early" in wording.forecast(found)
    assert expected_savings("guarded", []) == 0.5
    assert expected_savings("guarded", [0.8] * 9) == pytest.approx(0.77)
    assert expected_savings("none", []) == 0.0


def test_time_left_counts_on_what_is_still_to_be_spared() -> None:
    known = {"planned": 1000, "savings": 0.6, "rows_per_second": 10.0}
    assert seconds_left(left=900, spared=0, **known) == pytest.approx(30.0)
    assert seconds_left(left=300, spared=600, **known) == pytest.approx(30.0)
    assert seconds_left(left=100, spared=100, **known) == 0.0


def test_a_profile_survives_its_way_through_the_store() -> None:
    point = GridPoint(
        num_jobs=2,
        adapter_batch_size=4,
        row_tokens=50.0,
        size=PassSize(tokens=400, labels=100, lora_rank=8),
        num_tokens=400,
        seconds=0.5,
        peak_bytes=10**6,
    )
    assert point.tokens_per_second == 800 and point.samples_per_second == 16
    profile = ModelProfile(
        points=(point,), memory=MemoryFit(scale=1.5), speed=SPEED, speed_residual=0.01, profile_seconds=3.0
    )
    assert ModelProfile.from_json(profile.to_json()) == profile
