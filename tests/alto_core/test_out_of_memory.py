"""Memory that runs out in mid-task: the step is undone, the executor makes room, and every curve stays what it was."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alto_core.config import TuningTask
from alto_core.domain import Boundary
from alto_core.engine.backbone import load_backbone
from alto_core.engine.capture_choice import PassKind
from alto_core.engine.engine import Engine
from alto_core.engine.passes import PassRunner, PassWork
from alto_core.executor import Executor
from alto_core.job_run import JobRun
from alto_core.preparation import TaskPlan, plan_task
from alto_core.profiling import leaked_memory

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan(tiny_task: Callable[..., TuningTask]) -> TaskPlan:
    space = {"learning_rate": [1e-3, 1e-2], "lora_rank": 4, "adapter_batch_size": [2, 4]}
    return plan_task(tiny_task(search_space=space, budget={"steps": 6, "eval_interval_fraction": 0.5}))


def train(plan: TaskPlan, folder: Path) -> list[Boundary]:
    runs = [
        JobRun(job=job, budget=plan.budgets[job.job_id], folder=folder / job.job_id, start_step=0, target_step=6)
        for job in plan.jobs
    ]
    backbone = load_backbone(plan.task.model, "cpu")
    with Engine(backbone, target_modules=plan.jobs[0].target_modules, num_slots=4, rank_rows=16) as engine:
        session, boundaries = Executor(engine, plan.data, data_seed=0).run(runs), []
        boundary = next(session, None)
        while boundary is not None:
            boundaries.append(boundary)
            try:
                boundary = session.send(())
            except StopIteration:
                break
        return boundaries


def curves(boundaries: list[Boundary]) -> dict[tuple[str, int], float]:
    records = [record for boundary in boundaries for record in boundary.steps]
    found = {(record.job_id, record.step): record.train_loss for record in records}
    assert len(found) == len(records), "a step was made twice"
    return found


def limit_memory(monkeypatch: pytest.MonkeyPatch, allowed: Callable[[int, PassKind], bool]) -> list[int]:
    """Passes whose forward and backward have run when memory is found short, as where the last allocation fails."""
    run, refused = PassRunner.run, []

    def limited(self: PassRunner, kind: PassKind, work: PassWork) -> Any:
        losses = run(self, kind, work)
        if not allowed(work.batch.num_tokens, kind):
            refused.append(work.batch.num_tokens)
            raise torch.OutOfMemoryError("out of memory (made up)")
        return losses

    monkeypatch.setattr(PassRunner, "run", limited)
    return refused


def test_smaller_passes_give_the_same_curves(plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(plan, tmp_path / "a")
    refused = limit_memory(monkeypatch, lambda tokens, kind: kind is PassKind.LOSSES or tokens <= 50)
    short = train(plan, tmp_path / "b")
    assert refused
    assert curves(short) == pytest.approx(curves(whole), abs=1e-5)
    notes = [note for boundary in short for note in boundary.shortages]
    assert notes and all(note.evicted_job_id is None for note in notes)
    assert notes[-1].max_pass_tokens <= 50 or len(notes) == len(refused)


def test_a_job_that_has_to_go_waits_and_continues_with_the_same_curve(
    plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(plan, tmp_path / "a")
    calls = {"n": 0}

    def steals_for_a_while(tokens: int, kind: PassKind) -> bool:
        """Large micro batches find no room from the third training pass on, for a while."""
        calls["n"] += kind is not PassKind.LOSSES
        return kind is PassKind.LOSSES or not 3 <= calls["n"] < 14 or tokens <= 20

    limit_memory(monkeypatch, steals_for_a_while)
    short = train(plan, tmp_path / "b")
    notes = [note for boundary in short for note in boundary.shortages]
    evicted = [note.evicted_job_id for note in notes if note.evicted_job_id]
    assert evicted, notes
    assert not [failure for boundary in short for failure in boundary.failures]
    assert curves(short) == pytest.approx(curves(whole), abs=1e-5)
    for job in plan.jobs:
        name = Path(job.job_id) / "adapter" / "adapter_model.safetensors"
        assert (tmp_path / "b" / name).is_file()


def test_a_job_that_fits_not_even_alone_fails_with_its_size_and_others_finish(
    plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = sorted(len(row.token_ids) for row in plan.data.train.rows)
    limit = 2 * lengths[-1]
    assert 4 * lengths[0] > limit, "a micro batch of four rows is meant to be too large"
    limit_memory(monkeypatch, lambda tokens, kind: kind is PassKind.LOSSES or tokens <= limit)
    boundaries = train(plan, tmp_path)
    failed = {failure.job_id: failure.reason for boundary in boundaries for failure in boundary.failures}
    assert set(failed) == {job.job_id for job in plan.jobs if job.adapter_batch_size == 4}
    assert all("one micro batch of 4 rows" in reason for reason in failed.values())
    done = [step for _, step in curves(boundaries)]
    assert done.count(6) == 2


def test_evaluation_goes_on_in_smaller_passes(plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(plan, tmp_path / "a")
    limit_memory(monkeypatch, lambda tokens, kind: kind is not PassKind.LOSSES or tokens <= 40)
    short = train(plan, tmp_path / "b")
    pairs = zip(*([e.val_loss for b in found for e in b.evaluations] for found in (whole, short)), strict=True)
    assert all(math.isclose(one, other, abs_tol=1e-5) for one, other in pairs)
    assert any("evaluation in passes" in note.text for boundary in short for note in boundary.shortages)


def test_another_error_is_not_taken_for_a_shortage(
    plan: TaskPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("wrong shape")

    monkeypatch.setattr(PassRunner, "run", broken)
    with pytest.raises(RuntimeError, match="wrong shape"):
        train(plan, tmp_path)


REAL_LIMIT = """
import resource, sys, torch
from alto_core.device import is_out_of_memory
torch.set_num_threads(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
try:
    torch.empty(2**30)
except (RuntimeError, MemoryError) as error:
    sys.exit(0 if is_out_of_memory(error) else f"not recognized: {error}")
sys.exit("was not refused")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits address space as Linux does")
def test_what_torch_says_under_a_real_limit_of_memory_is_recognized() -> None:
    subprocess.run([sys.executable, "-c", REAL_LIMIT], check=True, cwd=REPOSITORY)


def test_memory_that_stays_behind_is_told(living_tensor_bytes: Callable[[], int]) -> None:
    kept = []
    with leaked_memory(living_tensor_bytes) as leaked:
        kept.append(torch.zeros(30 * 2**20))
    assert leaked[0] == pytest.approx(120 * 2**20, rel=0.1)
    with leaked_memory(living_tensor_bytes) as leaked:
        torch.zeros(30 * 2**20)
    assert leaked[0] == 0
