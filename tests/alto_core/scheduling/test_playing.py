"""Jobs played through slots: rounds end where jobs are evaluated or leave, freed slots are filled at once."""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.scheduling.intra_task import Capacity, JobSize
from alto_core.scheduling.playing import JobWork, Round, play


def work(name: str, last_step: int = 10, *, first_step: int = 0, eval_steps: Sequence[int] = ()) -> JobWork:
    return JobWork(
        size=JobSize(job_id=name, adapter_batch_size=1, lora_rank=8, row_tokens=100),
        last_step=last_step,
        first_step=first_step,
        eval_steps=tuple(eval_steps),
    )


def rounds(works: Sequence[JobWork], slots: int) -> list[Round]:
    return list(play(works, Capacity(num_slots=slots, rank_rows=1000, step_tokens=100.0 * slots)))


def test_a_round_ends_where_a_job_is_evaluated_or_leaves() -> None:
    found = rounds([work("a", 10, eval_steps=(4, 10)), work("b", 6, eval_steps=(3,))], 2)
    assert [(dict(one.steps_made), one.num_steps) for one in found] == [
        ({"a": 0, "b": 0}, 3),
        ({"a": 3, "b": 3}, 1),
        ({"a": 4, "b": 4}, 2),
        ({"a": 6}, 4),
    ]
    assert [one.due for one in found] == [("b",), ("a",), ("b",), ("a",)]
    assert [one.leaving for one in found] == [(), (), ("b",), ("a",)]


def test_freed_slots_are_filled_at_once() -> None:
    found = rounds([*(work(f"{i}", 10) for i in range(3)), *(work(f"{i}", 20) for i in range(3, 8))], 2)
    assert {one.occupancy for one in found if one.num_waiting} == {1.0}
    assert sorted(job_id for one in found for job_id in one.admitted) == [str(i) for i in range(8)]
    assert sum(len(one.steps_made) * one.num_steps for one in found) == 3 * 10 + 5 * 20


def test_a_stretch_begins_where_the_one_before_ended() -> None:
    (found,) = rounds([work("a", 10, first_step=4, eval_steps=(4, 10))], 1)
    assert (dict(found.steps_made), found.num_steps, found.due) == ({"a": 4}, 6, ("a",))


def test_a_job_that_fits_in_no_way_is_left_out() -> None:
    capacity = Capacity(num_slots=1, rank_rows=4, step_tokens=100.0)
    assert list(play([work("a")], capacity)) == []
