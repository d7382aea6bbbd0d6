"""What users and profiles may say: a value that no solver takes is refused by the task's name, the rest is planned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from alto_core.scheduling.admission import MAX_SECONDS, TaskRequest, admit
from alto_core.scheduling.effort import PlannerOptions
from alto_core.scheduling.instance import Host
from alto_core.scheduling.planner import make_plan

HOSTS = (Host(host_id="a", gpus=(0, 1, 2, 3), gpu_bytes=100), Host(host_id="b", gpus=(0, 1), gpu_bytes=500))


@pytest.mark.parametrize(
    ("seconds", "planned"),
    [(1.5, 2), (np.float64(3), 3), (np.int64(4), 4), (0, 1), (0.001, 1), (MAX_SECONDS, MAX_SECONDS)],
)
def test_durations_are_rounded_up_to_whole_seconds(seconds: Any, planned: int) -> None:
    plan = make_plan([TaskRequest(task_id="a-1", num_gpus=1, seconds=seconds)], HOSTS)
    assert not plan.refusals
    assert plan.makespan == planned


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -3, 4e18, 10**400, "60", None, True])
def test_a_duration_that_is_none_is_refused_by_name_and_the_rest_is_planned(seconds: Any) -> None:
    good = TaskRequest(task_id="good-1", num_gpus=2, seconds=60)
    plan = make_plan([TaskRequest(task_id="bad-1", num_gpus=1, seconds=seconds), good], HOSTS)
    assert [refusal.task_id for refusal in plan.refusals] == ["bad-1"]
    assert "expected seconds" in plan.refusals[0].reason
    assert [placement.task_id for placement in plan.placements] == ["good-1"]


@pytest.mark.parametrize("num_gpus", [0, -1, 5, 1.5, "2", None, True, 10**30])
def test_an_impossible_number_of_gpus_is_refused_by_name_and_the_rest_is_planned(num_gpus: Any) -> None:
    good = TaskRequest(task_id="good-1", num_gpus=4, seconds=60)
    plan = make_plan([TaskRequest(task_id="bad-1", num_gpus=num_gpus, seconds=60), good], HOSTS)
    assert [refusal.task_id for refusal in plan.refusals] == ["bad-1"]
    assert "num_gpus" in plan.refusals[0].reason
    assert [placement.task_id for placement in plan.placements] == ["good-1"]


def test_gpus_with_the_memory_and_in_the_number_must_be_on_one_host() -> None:
    small, large = (TaskRequest(task_id=f"t-{n}", num_gpus=n, seconds=5, min_gpu_bytes=200) for n in (2, 3))
    tasks, refusals = admit([small, large], HOSTS)
    assert [task.task_id for task in tasks] == ["t-2"]
    assert "expected at most 100" in refusals[0].reason
    assert make_plan([small], HOSTS).placements[0].host_id == "b"


def test_an_id_that_comes_twice_is_planned_once() -> None:
    request = TaskRequest(task_id="t-1", num_gpus=1, seconds=5)
    plan = make_plan([request, request], HOSTS)
    assert len(plan.placements) == len(plan.refusals) == 1


@pytest.mark.parametrize("options", [PlannerOptions(), PlannerOptions(seconds=0)])
def test_nothing_to_plan_is_an_empty_plan(options: PlannerOptions) -> None:
    plan = make_plan([], HOSTS, options=options)
    assert (plan.placements, plan.makespan, plan.bound, plan.gap) == ((), 0, 0, 0.0)
    no_host = make_plan([TaskRequest(task_id="t-1", num_gpus=1, seconds=5)], ())
    assert no_host.placements == ()
    assert "alto up" in no_host.refusals[0].reason
