"""A task whose ranks each hold a part of the backbone: it ends as on one device, and survives the loss of a rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from alto_core.config import TuningTask
from alto_core.domain import TaskState
from alto_core.early_exit.curves import Curve
from alto_core.engine import ranks
from alto_core.errors import EngineError
from alto_core.profiling import Layout, PackingQuestion
from alto_core.settings import load_settings
from alto_core.store import Store
from alto_core.supervision import Supervisor
from alto_core.tracking import Tracker
from flows.api import resume, tune

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]
SPACE = {"learning_rate": [1e-3, 1e-2, 1e30], "lora_rank": 4, "adapter_batch_size": 4}
BUDGET = {"steps": 8, "eval_interval_fraction": 0.25, "gate_warmup_fraction": 0.25}
TOLERANCE = 1e-4
"""Nats, after eight updates on other packings."""


@pytest.mark.usefixtures("prefect_server", "workspace_home")
def test_a_task_that_lost_a_rank_goes_on_on_fewer_and_ends_as_on_one_device(
    tiny_task: Callable[..., TuningTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_CHECKPOINT_SECONDS", "0")
    unbroken = tune(tiny_task(search_space=SPACE, budget=BUDGET, evaluation={}))

    monkeypatch.setattr(PackingQuestion, "choose_layout", _shard_over_all)
    task = tiny_task(search_space=SPACE, budget=BUDGET, evaluation={}, cluster={"num_gpus": 4})
    store = Store(load_settings())
    task_id = store.new_task_id(task.name)
    with monkeypatch.context() as patch:
        _kill_rank_at_boundary(patch, number=3)
        with pytest.raises(EngineError, match=r"rank 1 of 4 \(cpu\) was lost: ended by SIGKILL"):
            tune(task, task_id=task_id)
    record = store.task(task_id)
    assert record.state is TaskState.FAILED
    assert "rank 1 of 4 (cpu) was lost" in [e.text for e in store.events(task_id) if e.kind == "error"][-1]
    assert any("4 ranks, each with a part" in e.text for e in store.events(task_id) if e.kind == "ranks")

    monkeypatch.setattr("alto_core.device.pick_devices", lambda wanted, at_most: ("cpu", "cpu"))
    result = resume(task_id)

    warnings = [e.text for e in store.events(task_id) if e.kind == "warning"]
    assert any("asks for 4 GPUs, and this process sees 2" in text for text in warnings)
    assert ranks._current is None, "the devices are free after the task"
    columns = ["job_id", "state", "step", "gate_rank"]
    assert result.leaderboard[columns].equals(unbroken.leaderboard[columns])
    assert result.winner == unbroken.winner
    assert [s.loss for s in result.scores] == pytest.approx([s.loss for s in unbroken.scores], abs=TOLERANCE)
    found, expected = (_curves(id_) for id_ in (task_id, unbroken.task_id))
    for job_id, curve in expected.items():
        assert found[job_id].train_steps == curve.train_steps
        assert found[job_id].train_losses == pytest.approx(curve.train_losses, abs=TOLERANCE, nan_ok=True)
        assert found[job_id].val_losses == pytest.approx(curve.val_losses, abs=TOLERANCE, nan_ok=True)


def _shard_over_all(question: PackingQuestion, model: object, *, asked: int | None, available: int) -> Layout:
    """The tiny model fits everywhere, so nothing would divide it."""
    return Layout(num_ranks=available, sharded=True)


def _kill_rank_at_boundary(patch: pytest.MonkeyPatch, *, number: int) -> None:
    seen, judge = [], Supervisor._judge

    def kill_once(self: Supervisor, *arguments: object) -> object:
        seen.append(1)
        if len(seen) == number:
            assert ranks._current is not None
            os.kill(ranks._current[1].process_ids[1], signal.SIGKILL)
        return judge(self, *arguments)  # type: ignore[arg-type]

    patch.setattr(Supervisor, "_judge", kill_once)


def _curves(task_id: str) -> dict[str, Curve]:
    return Tracker(load_settings()).task_runs(task_id).read_curves()
