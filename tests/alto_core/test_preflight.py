"""The profile stage on a real tiny model: measured once, recalled after that, refused with the arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import alto_core.preflight
from alto_core.config import TuningTask
from alto_core.domain import JobState, TaskState
from alto_core.engine.backbone import load_backbone
from alto_core.errors import EngineError
from alto_core.estimation import estimate_task, gpus_needed
from alto_core.preflight import profile_task
from alto_core.preparation import create_task, plan_task
from alto_core.profiling import Layout, profile_key, shape_of_backbone, shape_of_model
from alto_core.profiling.gpu_kinds import GPU_KINDS, gpu_kind
from alto_core.savings import past_savings
from alto_core.settings import load_settings
from alto_core.store import JobUpdate
from alto_core.workspace import Workspace

pytestmark = pytest.mark.usefixtures("workspace_home")


def made(task: TuningTask, task_id: str = "tiny-1") -> Workspace:
    create_task(plan_task(task), task_id, load_settings())
    return Workspace.open(task_id)


def test_a_model_is_measured_once_and_its_profile_used_again(
    tiny_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = made(tiny_task())
    measured, expected = profile_task(workspace)
    assert measured.num_slots == len(workspace.jobs) and measured.tokens_per_second > 0
    assert 0 < expected.seconds < expected.seconds_without_exit
    assert workspace.store.profile("tiny-1") == measured
    (event,) = [e for e in workspace.store.events("tiny-1") if e.kind == "forecast"]
    assert event.numbers["seconds_left"] == expected.seconds and "6 jobs in 1 wave" in event.text
    assert event.numbers["training_seconds"] == expected.terms.training > 0
    assert event.numbers["compilation_seconds"] == event.numbers["captures_seconds"] == 0, "a CPU captures nothing"

    monkeypatch.setattr(alto_core.preflight, "measure_grid", None)  # a call would fail
    again, _ = profile_task(made(tiny_task(), "tiny-2"))
    assert again.seconds_per_step == measured.seconds_per_step
    estimate = estimate_task(plan_task(tiny_task()), load_settings(), None)
    assert estimate.basis == "measured" and estimate.forecast
    # The same task in a process that has yet to load the model.
    assert estimate.forecast.terms.start > expected.terms.start
    assert estimate.forecast.terms.training == pytest.approx(expected.terms.training)


def test_an_estimate_and_the_queue_know_on_how_many_devices_a_task_trains(tiny_task: Callable[..., TuningTask]) -> None:
    one, two, auto = (plan_task(tiny_task(cluster={"num_gpus": num_gpus})) for num_gpus in (1, 2, "auto"))
    alone, together = (estimate_task(plan, load_settings(), None) for plan in (one, two))
    assert (together.layout, together.num_slots) == (Layout(num_ranks=2), alone.num_slots)
    assert together.adapter_bytes < alone.adapter_bytes, "each device has half of the jobs"
    assert [gpus_needed(plan, gpu_bytes=2**34, most=8) for plan in (one, two, auto)] == [1, 2, 1]


def test_a_model_has_the_same_shape_before_and_after_it_is_loaded(tiny_task: Callable[..., TuningTask]) -> None:
    section = tiny_task().model
    backbone = load_backbone(section, "cpu")
    loaded = shape_of_backbone(backbone, ["q_proj", "down_proj"])
    assert loaded == shape_of_model(section, ["q_proj", "down_proj"], on_gpu=False)
    assert loaded.num_parameters == sum(p.numel() for p in backbone.model.parameters())
    assert (loaded.adapted_columns, loaded.adapted_layers) == (2 * (32 + 32 + 64 + 32), 4)
    assert loaded.mlp_inputs == 2 and loaded.key_value_width == 16
    other = dataclasses.replace(loaded, element_bytes=2)
    assert profile_key(section, loaded, backbone.device, cuda_graph=True) != profile_key(
        section, other, backbone.device, cuda_graph=True
    )


def test_a_task_whose_smallest_job_cannot_fit_is_refused_with_the_arithmetic(
    tiny_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone_bytes = shape_of_model(tiny_task().model, ["q_proj"], on_gpu=False).backbone_bytes
    budget = backbone_bytes + 150_000
    monkeypatch.setattr(alto_core.preflight, "memory_budget", lambda *_: budget)
    with pytest.raises(EngineError) as error:
        profile_task(made(tiny_task(search_space={"learning_rate": 1e-3, "lora_rank": 2, "adapter_batch_size": 16})))
    text = str(error.value)
    for part in ("backbone", "adapter of rank 2", "one pass of", "may be used", "adapter_batch_size: "):
        assert part in text


def test_an_estimate_for_another_gpu_is_arithmetic_and_a_larger_one_is_faster(
    tiny_task: Callable[..., TuningTask],
) -> None:
    plan, settings = plan_task(tiny_task()), load_settings()
    small, large = (estimate_task(plan, settings, GPU_KINDS[name]) for name in ("t4-16", "h100-80"))
    assert small.basis == "arithmetic" and small.num_slots == 6
    assert small.peak_bytes <= small.budget_bytes < large.budget_bytes
    assert small.forecast and large.forecast and small.forecast.seconds > large.forecast.seconds
    with pytest.raises(Exception, match="h100-80"):
        gpu_kind("h100")


def test_savings_are_learned_from_finished_tasks_of_the_same_preset(
    tiny_task: Callable[..., TuningTask], tmp_path: Path
) -> None:
    workspace = made(tiny_task())
    store, jobs = workspace.store, list(workspace.jobs)
    store.start_task("tiny-1")
    ends = [JobUpdate(job_id=job_id, state=JobState.UNDERPERFORMING, step=5) for job_id in jobs[1:]]
    store.update_jobs("tiny-1", [JobUpdate(job_id=jobs[0], state=JobState.FINISHED, step=20), *ends])
    preset = workspace.task.early_exit.preset
    assert past_savings(preset, store) == ()
    store.end_task("tiny-1", TaskState.FINISHED)
    assert past_savings(preset, store) == pytest.approx((1 - 45 / 120,))
    assert past_savings("none" if preset != "none" else "paper", store) == ()
