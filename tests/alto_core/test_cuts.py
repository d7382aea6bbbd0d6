"""Cuts on disk: the newest whole one is found, and what is damaged is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alto_core.cuts import Cut, CutLog, Place, Session
from alto_core.domain import LoraJob
from alto_core.engine.checkpoint import JobSnapshot, write_snapshot

JOB = LoraJob(learning_rate=1e-3, lora_rank=2, lora_alpha=4, adapter_batch_size=1, target_modules=("q_proj",))
WARMUP = Session(until=0.1, job_ids=(JOB.job_id,))
REST = Session(until=1.0, job_ids=(JOB.job_id, "b"), reserve=(Place(job_id="parked", step=4),))


def cut_at(step: int, session: Session = REST) -> Cut:
    places = (Place(job_id=JOB.job_id, step=step, rank_start=0), Place(job_id="waits", step=0))
    return Cut(session=session, places=places, joined=("joined",))


@pytest.fixture
def states(tmp_path: Path) -> Callable[[str], Path]:
    """Whole states of the job after steps 1 to 3."""
    folder = tmp_path / "states"
    for step in (1, 2, 3):
        tensors = {"params": {"a": torch.full((8,), float(step))}}
        state = JobSnapshot(job=JOB, step=step, best_step=None, best_val_loss=None, tensors=tensors)
        write_snapshot(state, folder, keep_from=1)
    return lambda job_id: folder


def damage(folder: Path, step: int) -> None:
    file = folder / f"step-{step:08d}" / "params.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_the_newest_is_read_back_and_two_are_kept(tmp_path: Path, states: Callable[[str], Path]) -> None:
    log = CutLog(tmp_path / "cuts")
    assert log.newest_whole(states) == (None, ())
    for step in (1, 2, 3):
        log.write(cut_at(step))
    assert log.newest_whole(states) == (cut_at(3), ())
    assert len(list((tmp_path / "cuts").iterdir())) == 2
    assert cut_at(3).steps == {JOB.job_id: 3, "waits": 0}


@pytest.mark.parametrize(
    "change",
    [lambda text: text[: len(text) // 2], lambda text: "", lambda text: text.replace('\\"step\\": 3', '\\"step\\": 1')],
    ids=["cut short", "empty", "changed"],
)
def test_a_damaged_cut_gives_way_to_the_one_before(
    tmp_path: Path, states: Callable[[str], Path], change: Callable[[str], str]
) -> None:
    """K1: a half-written checkpoint is never the newest."""
    log = CutLog(tmp_path / "cuts")
    for step in (2, 3):
        log.write(cut_at(step))
    newest = sorted((tmp_path / "cuts").iterdir())[-1]
    assert change(newest.read_text()) != newest.read_text()
    newest.write_text(change(newest.read_text()))
    (tmp_path / "cuts" / ".writing-cut-00000009.json").write_text("{")
    cut, faults = log.newest_whole(states)
    assert cut == cut_at(2)
    assert [str(newest) in fault for fault in faults] == [True]


def test_a_damaged_state_takes_all_jobs_to_the_cut_before(tmp_path: Path, states: Callable[[str], Path]) -> None:
    """K1: so that jobs that trained together stand beside each other again."""
    log = CutLog(tmp_path / "cuts")
    for step in (2, 3):
        log.write(cut_at(step))
    damage(states(""), 3)
    cut, (fault,) = log.newest_whole(states)
    assert cut == cut_at(2)
    assert "step-00000003: params.safetensors is cut or changed" in fault


def test_the_cut_of_another_stretch_is_no_substitute(tmp_path: Path, states: Callable[[str], Path]) -> None:
    log = CutLog(tmp_path / "cuts")
    log.write(cut_at(2, WARMUP))
    log.write(cut_at(3))
    damage(states(""), 3)
    cut, faults = log.newest_whole(states)
    assert cut == cut_at(3), "the job alone goes back to its older state"
    assert len(faults) == 1
