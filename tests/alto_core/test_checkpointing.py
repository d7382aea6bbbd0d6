"""States and cuts in the background: in order, whole, kept long enough, and errors told at the next boundary."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from alto_core import checkpointing
from alto_core.checkpointing import Checkpointer
from alto_core.cuts import Cut, CutLog, Place, Session
from alto_core.domain import LoraJob
from alto_core.engine.checkpoint import JobSnapshot, write_snapshot
from alto_core.engine.state_folders import fault_of_state
from alto_core.errors import EngineError

JOBS = tuple(
    LoraJob(learning_rate=rate, lora_rank=2, lora_alpha=4, adapter_batch_size=1, target_modules=("q_proj",))
    for rate in (1e-3, 1e-2)
)
SESSION = Session(until=1.0, job_ids=tuple(job.job_id for job in JOBS))


def snapshot(job: LoraJob, step: int, floats: int = 64) -> JobSnapshot:
    tensors = {"params": {"0.q_proj.lora_A": torch.full((floats,), float(step))}}
    return JobSnapshot(job=job, step=step, best_step=None, best_val_loss=None, tensors=tensors)


def cut_at(step: int, *jobs: LoraJob) -> Cut:
    places = (Place(job_id=job.job_id, step=step, rank_start=2 * i) for i, job in enumerate(jobs))
    return Cut(session=SESSION, places=tuple(places))


def take(checkpoints: Checkpointer, folder: Path, step: int, *jobs: LoraJob) -> None:
    states = {folder / job.job_id: (lambda job=job: snapshot(job, step)) for job in jobs}
    checkpoints.cut(cut_at(step, *jobs), states)


def steps_of(folder: Path, job: LoraJob) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / job.job_id).glob("step-*"))


@contextmanager
def disk_that_takes(num_bytes: int) -> Iterator[None]:
    """Files may not grow beyond a size: writing fails as it does on a full disk, in the same system calls."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_cut_is_there_once_all_of_its_states_are(tmp_path: Path) -> None:
    log = CutLog(tmp_path / "cuts")
    checkpoints = Checkpointer(log, interval_seconds=0)
    with checkpoints.writing():
        take(checkpoints, tmp_path, 3, *JOBS)
    cut, faults = log.newest_whole(lambda job_id: tmp_path / job_id)
    assert cut == cut_at(3, *JOBS)
    assert faults == ()
    assert checkpoints.held_seconds > 0
    assert checkpoints.written_bytes == 2 * 64 * 4


def test_training_does_not_wait_for_the_disk_and_one_cut_is_in_flight_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def slow(*args: Any, **kwargs: Any) -> None:
        assert released.wait(60)
        write_snapshot(*args, **kwargs)

    monkeypatch.setattr(checkpointing, "write_snapshot", slow)
    log = CutLog(tmp_path / "cuts")
    checkpoints = Checkpointer(log, interval_seconds=0)
    with checkpoints.writing():
        take(checkpoints, tmp_path, 1, *JOBS)
        assert not checkpoints.is_due(), "the disk still has the one before"
        assert log.newest_readable() is None, "training went on before anything was written"
        released.set()
        checkpoints.finish()
    assert log.newest_readable() == cut_at(1, *JOBS)


def test_a_full_disk_leaves_the_older_cut_and_is_told_at_the_next_boundary(tmp_path: Path) -> None:
    log = CutLog(tmp_path / "cuts")
    checkpoints = Checkpointer(log, interval_seconds=0)
    with checkpoints.writing():
        take(checkpoints, tmp_path, 1, *JOBS)
        checkpoints.finish()
        with disk_that_takes(1000):
            checkpoints.cut(cut_at(2, JOBS[0]), {tmp_path / JOBS[0].job_id: lambda: snapshot(JOBS[0], 2, floats=4096)})
            with pytest.raises(EngineError) as told:
                checkpoints.finish()
        checkpoints.check()  # once
    text = str(told.value)
    assert f"{tmp_path / JOBS[0].job_id}/step-00000002: {4096 * 4} bytes could not be written" in text
    assert "then resume the task" in text
    assert log.newest_whole(lambda job_id: tmp_path / job_id) == (cut_at(1, *JOBS), ())
    assert steps_of(tmp_path, JOBS[0]) == [1]


def test_a_failure_ends_the_block_unless_the_block_failed_itself(tmp_path: Path) -> None:
    (tmp_path / "in the way").write_text("a file where a folder should be")
    for error, expected in ((None, EngineError), (KeyError("the block's own"), KeyError)):
        checkpoints = Checkpointer()
        with pytest.raises(expected), checkpoints.writing():
            checkpoints.save(tmp_path / "in the way" / "state", lambda: snapshot(JOBS[0], 1))
            if error is not None:
                raise error


def test_what_a_cut_and_the_one_before_it_name_is_kept(tmp_path: Path) -> None:
    """K5: the states of the two newest cuts stay, whatever a job that left has written since."""
    first, second = JOBS
    checkpoints = Checkpointer(CutLog(tmp_path / "cuts"), interval_seconds=0)
    with checkpoints.writing():
        for step in (1, 2, 3):
            take(checkpoints, tmp_path, step, *JOBS)
        checkpoints.save(tmp_path / first.job_id, lambda: snapshot(first, 4))
        checkpoints.finish()
        assert steps_of(tmp_path, first) == [2, 3, 4]
        assert steps_of(tmp_path, second) == [2, 3]
        for step in (5, 6):
            take(checkpoints, tmp_path, step, second)
    assert steps_of(tmp_path, first) == [3, 4]
    assert steps_of(tmp_path, second) == [5, 6]


def test_a_whole_state_is_not_written_again(tmp_path: Path) -> None:
    """A cut may name it: while it is replaced, a kill would leave none."""
    checkpoints = Checkpointer()
    with checkpoints.writing():
        for value in (1, 2):
            state = snapshot(JOBS[0], 7)
            state.tensors["params"]["0.q_proj.lora_A"].fill_(float(value))
            checkpoints.save(tmp_path, lambda state=state: state)
    written = (tmp_path / "step-00000007" / "params.safetensors").read_bytes()
    assert torch.full((64,), 1.0).numpy().tobytes() in written
    assert fault_of_state(tmp_path, 7) is None


def test_cuts_come_less_often_where_copying_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(checkpointing.time, "monotonic", lambda: clock[0])

    def copy() -> JobSnapshot:
        clock[0] += 2.0
        return snapshot(JOBS[0], 1)

    checkpoints = Checkpointer(CutLog(tmp_path / "cuts"), interval_seconds=60)
    clock[0] += 61
    assert checkpoints.is_due()
    checkpoints.cut(cut_at(1, JOBS[0]), {tmp_path / JOBS[0].job_id: copy})
    checkpoints.finish()
    clock[0] += 150
    assert not checkpoints.is_due(), "two seconds may be spent in two hundred, not more often"
    clock[0] += 51
    assert checkpoints.is_due()
