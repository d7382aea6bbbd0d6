"""How long it takes: fits of speed, terms of a duration, savings learned from past tasks. Pure values."""

from __future__ import annotations

import pytest

from alto_core import wording
from alto_core.scheduling.memory_model import MemoryFit, PassSize
from alto_core.scheduling.model_profile import GridPoint, ModelProfile
from alto_core.scheduling.prediction import (
    CACHED_COMPILE_SHARE,
    DurationTerms,
    Forecast,
    PassSpeed,
    SideCosts,
    expected_savings,
    fit_speed,
    seconds_left,
    with_early_exit,
)

SPEED = PassSpeed(base_seconds=1.0, seconds_per_token=0.01, eval_share=0.5)


def test_speed_is_fitted_and_never_negative() -> None:
    fit = fit_speed([(100, 0.5 + 1.0), (400, 0.5 + 4.0), (1000, 0.5 + 10.0)])
    assert fit.base_seconds == pytest.approx(0.5) and fit.seconds_per_token == pytest.approx(0.01)
    falling = fit_speed([(100, 2.0), (200, 1.0)])
    assert falling.base_seconds >= 0 and falling.seconds_per_token >= 0
    single = fit_speed([(100, 2.0)])
    assert single.step_seconds(100, 1000) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="at least one"):
        fit_speed([])


def test_a_step_pays_for_each_of_its_passes_and_an_evaluation_its_share() -> None:
    assert SPEED.step_seconds(250, 100) == pytest.approx(3 * 1.0 + 2.5)
    assert SPEED.pass_seconds(100) == pytest.approx(2.0)
    assert SPEED.evaluation_seconds(100) == pytest.approx(0.5)


def test_early_exit_shortens_what_goes_by_steps_and_past_tasks_outweigh_the_prior() -> None:
    terms = DurationTerms(training=50.0, evaluation=10.0, captures=5.0, start=2.0)
    assert terms.total == 67.0
    assert with_early_exit(terms, savings=0.4, gate_fraction=0.05) == pytest.approx(0.6 * 60 + 7)
    assert with_early_exit(terms, savings=0.99, gate_fraction=0.05) == pytest.approx(0.05 * 60 + 7)
    assert expected_savings("guarded", []) == 0.5
    assert expected_savings("guarded", [0.8] * 9) == pytest.approx(0.77)
    assert expected_savings("none", []) == 0.0


def test_a_forecast_is_told_in_one_line_and_its_terms_in_another() -> None:
    terms = DurationTerms(training=70.0, evaluation=21.0, captures=0.4)
    found = Forecast(seconds=91.4, terms=terms, num_jobs=7, waves=3, occupancy=1.0)
    assert wording.forecast(found) == "about 1 min 31 s, 7 jobs in 3 waves"
    assert wording.forecast_terms(found) == "training 1 min 10 s, evaluation 21 s"
    shortened = Forecast(seconds=40.0, terms=terms, num_jobs=7, waves=3, occupancy=1.0)
    assert "(1 min 31 s if none ends early)" in wording.forecast(shortened)


def test_a_loaded_process_pays_neither_again_and_another_finds_the_compiled_code() -> None:
    costs = SideCosts(load_seconds=3.0, compile_seconds=20.0, engine_seconds=1.0)
    assert costs.once_loaded(is_compiled=True) == SideCosts(engine_seconds=1.0)
    left = costs.once_loaded(is_compiled=False)
    assert left == SideCosts(compile_seconds=CACHED_COMPILE_SHARE * 20.0, engine_seconds=1.0)


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
    assert point.tokens_per_second == 800
    for captures in (False, True):
        profile = ModelProfile(
            points=(point,),
            memory=MemoryFit(scale=1.5),
            speed=SPEED,
            speed_residual=0.01,
            profile_seconds=3.0,
            costs=SideCosts(captures=captures, capture_seconds=1.5, compile_seconds=12.0),
        )
        assert ModelProfile.from_json(profile.to_json()) == profile
