"""What the engines of a task minimise, and the reference that it is measured against."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from alto_core import wording
from alto_core.cluster.stop import asked_to_stop
from alto_core.config import DpoSection
from alto_core.engine.engine import Engine
from alto_core.engine.objective import Objective
from alto_core.engine.preference_objective import PreferenceObjective
from alto_core.interruption import TaskStopped
from alto_core.references import pairs_needed
from alto_core.store import EventDraft

if TYPE_CHECKING:
    from alto_core.workspace import Workspace


def objective_of(workspace: Workspace) -> Objective | None:
    """What an engine of this task minimises; None: the usual. Complete once the reference is measured."""
    if workspace.references is None:
        return None
    section = workspace.task.dpo or DpoSection()
    return PreferenceObjective(
        section.options,
        workspace.references.by_row,
        beta=section.beta[0],
        starts_untuned=workspace.init_adapter is None,
    )


def measure_references(workspace: Workspace, engine: Engine) -> None:
    """Complete what the objective needs, in an engine that holds no job yet. Mostly it is on disk already.

    Raises:
        TaskStopped: as the task was asked to; what was measured is kept.
    """
    if workspace.references is None:
        return
    started, ask = time.monotonic(), asked_to_stop(workspace.task_id, workspace.settings)

    def stop_if_asked() -> None:
        if (stop := ask()) is not None:
            raise TaskStopped(stop)

    jobs = tuple(workspace.jobs.values())
    count = workspace.references.measure(
        engine,
        pairs_needed(workspace.data, jobs, workspace.budgets, seed=workspace.task.data.seed),
        max_tokens=engine.max_pass_tokens,
        start=None if workspace.init_adapter is None else (jobs[0], workspace.init_adapter),
        between_rounds=stop_if_asked,
    )
    if count:
        text = (
            f"measured the reference on {wording.plural(count, 'pair')}, for all jobs, in "
            f"{time.monotonic() - started:.1f} s; {engine.prompt_note}"
        )
        workspace.store.append_events(workspace.task_id, [EventDraft(kind="reference", text=text)])
