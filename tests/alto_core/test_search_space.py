"""From a search space to jobs."""

from __future__ import annotations

import time
from typing import Any

import pytest

from alto_core.config import TuningTask, parse_task
from alto_core.domain import LoraJob
from alto_core.errors import TaskFileError
from alto_core.search_space import expand_search_space

ENDINGS = ("v_proj", "q_proj")


def jobs_of(**space: Any) -> tuple[LoraJob, ...]:
    task: TuningTask = parse_task(
        {"name": "t", "model": {"name": "m"}, "data": {"source": "d"}, "budget": {"steps": 1}, "search_space": space}
    )
    return expand_search_space(task.search_space, ENDINGS)


def test_a_grid_is_every_combination_once() -> None:
    jobs = jobs_of(learning_rate=[1e-4, 1e-3], lora_rank=[8, 16], dropout=[0.0, 0.1], adapter_batch_size=4)
    assert len(jobs) == len({job.job_id for job in jobs}) == 8
    assert {(job.learning_rate, job.lora_rank, job.dropout) for job in jobs} == {
        (rate, rank, drop) for rate in (1e-4, 1e-3) for rank in (8, 16) for drop in (0.0, 0.1)
    }


def test_alpha_is_twice_the_rank_unless_given() -> None:
    assert [job.lora_alpha for job in jobs_of(learning_rate=1e-4, lora_rank=[8, 16])] == [16, 32]
    assert [job.lora_alpha for job in jobs_of(learning_rate=1e-4, lora_rank=[8, 16], alpha_over_rank=1)] == [8, 16]
    assert [job.lora_alpha for job in jobs_of(learning_rate=1e-4, lora_rank=[8, 16], lora_alpha=24)] == [24, 24]


def test_scale_divides_alpha_by_the_rank_or_its_root() -> None:
    plain = jobs_of(learning_rate=1e-4, lora_rank=16, lora_alpha=16)[0]
    rooted = jobs_of(learning_rate=1e-4, lora_rank=16, lora_alpha=16, use_rslora=True)[0]
    assert (plain.scale, rooted.scale) == (1.0, 4.0)


def test_all_linear_means_the_models_own_names_in_a_stable_order() -> None:
    assert jobs_of(learning_rate=1e-4, lora_rank=8)[0].target_modules == ("q_proj", "v_proj")


def test_target_modules_can_be_searched_over() -> None:
    jobs = jobs_of(learning_rate=1e-4, lora_rank=8, target_modules=[["v_proj", "q_proj"], ["q_proj"]])
    assert [job.target_modules for job in jobs] == [("q_proj", "v_proj"), ("q_proj",)]


def test_variants_are_dimensions_like_any_other() -> None:
    jobs = jobs_of(learning_rate=1e-4, lora_rank=8, lora_plus_ratio=[1, 16], init=["default", "pissa"])
    assert {(job.lora_plus_ratio, job.init, job.rank_rows) for job in jobs} == {
        (ratio, init, rows) for ratio in (1.0, 16.0) for init, rows in (("default", 8), ("pissa", 16))
    }
    listed = jobs_of(jobs=[{"learning_rate": 1e-4, "lora_rank": 8, "init": "pissa", "lora_plus_ratio": 16.0}])
    assert set(listed) < set(jobs)


def test_layers_and_ranks_are_dimensions_like_any_other() -> None:
    space = {"learning_rate": 1e-4, "lora_rank": 8}
    probed = {"probe": {"share": 0.25, "allocation": "proportional"}}
    jobs = jobs_of(**space, layers=["all", probed, {"probe": {"share": 0.5}}], train=["both", "b_only"])
    assert [(job.train, job.layer_share, job.rank_allocation, job.rank_rows) for job in jobs] == [
        (train, share, allocation, rows)
        for train in ("both", "b_only")
        for share, allocation, rows in ((1.0, "uniform", 8), (0.25, "gradient", 16), (0.5, "uniform", 8))
    ]
    assert jobs_of(**space, layers=probed) == jobs_of(jobs=[{**space, "layers": probed}])
    by_sensitivity = jobs_of(**space, layers=["all", {"probe": {}}], rank_allocation="sensitivity", init="tlora")
    assert [(job.layer_share, job.rank_allocation) for job in by_sensitivity] == [
        (1.0, "sensitivity"),
        (0.5, "sensitivity"),
    ]


@pytest.mark.parametrize("strategy", ["grid", "list"])
def test_two_allocations_are_refused(strategy: str) -> None:
    job = {
        "learning_rate": 1e-4,
        "lora_rank": 8,
        "layers": {"probe": {"allocation": "proportional"}},
        "rank_allocation": "sensitivity",
    }
    with pytest.raises(TaskFileError, match="only one of `rank_allocation: sensitivity` and `layers"):
        jobs_of(**job) if strategy == "grid" else jobs_of(jobs=[job])


@pytest.mark.parametrize(
    ("layers", "field", "message"),
    [
        ("most", r"\[0\]", "'all'"),
        ({"probe": {"share": 0}}, r"\[0\]\.probe\.share", "greater than 0"),
        ({"probe": {"share": 1}}, r"\[0\]\.probe", "below 1"),
        ({"probe": {"allocation": "even"}}, r"\[0\]\.probe\.allocation", "'uniform'"),
        ({"share": 0.5}, r"\[0\]\.share", "a known one"),
    ],
)
def test_layers_that_cannot_be_are_refused_by_their_name(layers: Any, field: str, message: str) -> None:
    with pytest.raises(TaskFileError, match=rf"search_space\.layers{field}: .*{message}"):
        jobs_of(learning_rate=1e-4, lora_rank=8, layers=layers)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_dora", True, "DoRA"),
        ("train", "a_only", "'both'"),
        ("rank_allocation", "gradient", "'uniform'"),
        ("init", "dora", "'default'"),
        ("init", ["pissa", "pissa"], "without repetition"),
        ("lora_plus_ratio", 0, "greater than 0"),
    ],
)
def test_a_variant_that_cannot_be_is_refused_by_its_name(field: str, value: Any, message: str) -> None:
    job = {"learning_rate": 1e-4, "lora_rank": 8, field: value}
    with pytest.raises(TaskFileError, match=rf"search_space\.{field}.*{message}"):
        jobs_of(**job)
    if not isinstance(value, list):
        with pytest.raises(TaskFileError, match=rf"search_space\.jobs\[0\]\.{field}.*{message}"):
            jobs_of(jobs=[job])
    assert jobs_of(learning_rate=1e-4, lora_rank=8, use_dora=False) == jobs_of(learning_rate=1e-4, lora_rank=8)


def test_ids_depend_on_every_field_and_on_nothing_else() -> None:
    first = jobs_of(learning_rate=[1e-4, 1e-3], lora_rank=8)
    larger = jobs_of(learning_rate=[1e-5, 1e-4, 1e-3], lora_rank=8)
    assert {job.job_id for job in first} < {job.job_id for job in larger}
    assert (
        jobs_of(learning_rate=1e-4, lora_rank=8)[0].job_id != jobs_of(learning_rate=1e-4, lora_rank=8, seed=1)[0].job_id
    )


def test_random_search_gives_distinct_jobs_that_its_seed_repeats() -> None:
    space: dict[str, Any] = {
        "strategy": "random",
        "learning_rate": {"min": 1e-5, "max": 1e-2},
        "lora_rank": [8, 16, 32],
        "num_jobs": 12,
    }
    jobs = jobs_of(**space)
    assert len({job.job_id for job in jobs}) == 12
    assert jobs == jobs_of(**space)
    assert jobs != jobs_of(**space, search_seed=1)
    assert all(1e-5 <= job.learning_rate <= 1e-2 for job in jobs)


def test_random_search_says_when_the_space_is_too_small() -> None:
    with pytest.raises(TaskFileError, match="at most 2, the distinct jobs"):
        jobs_of(strategy="random", learning_rate=1e-4, lora_rank=[8, 16], num_jobs=3)


def test_a_list_is_taken_as_it_stands_and_repetition_is_refused() -> None:
    listed = {"learning_rate": 1e-4, "lora_rank": 8, "adapter_batch_size": 2}
    jobs = jobs_of(strategy="list", jobs=[listed, {**listed, "lora_rank": 16, "lora_alpha": 16}])
    assert [(job.lora_rank, job.lora_alpha) for job in jobs] == [(8, 16), (16, 16)]
    with pytest.raises(TaskFileError, match=r"jobs\[1\]: got the same as jobs\[0\]"):
        jobs_of(strategy="list", jobs=[listed, listed])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"num_jobs": 10**9}, "num_jobs: got 1000000000, expected at most 2"),
        ({"num_jobs": 50, "learning_rate": {"min": 1.0, "max": 1.001}}, "num_jobs: got 50, expected at most 1"),
        (
            {"num_jobs": 5, "adapter_batch_size": list(range(1, 129)), "lora_rank": list(range(1, 129))},
            "search_space: got 32768 combinations of its values, expected at most 10000",
        ),
    ],
    ids=["more than there are", "a range with one value", "too many"],
)
def test_a_space_that_would_take_for_ever_is_refused_at_once(space: dict[str, Any], message: str) -> None:
    started = time.process_time()
    with pytest.raises(TaskFileError, match=message):
        jobs_of(**{"strategy": "random", "learning_rate": [1e-3, 1e-2], "lora_rank": 4, **space})
    assert time.process_time() - started < 10
