"""The engines of a task: their slots, what they minimise, and the reference that it is measured against."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from alto_core import wording
from alto_core.cluster.stop import asked_to_stop
from alto_core.config import DpoSection
from alto_core.engine.adapter_parallel import AnyEngine, ParallelEngine
from alto_core.engine.adapter_plan import LayerMeasure, adapted_names
from alto_core.engine.backbone import load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.objective import Objective
from alto_core.engine.preference_objective import PreferenceObjective
from alto_core.interruption import TaskStopped
from alto_core.layer_measures import measures_of
from alto_core.references import pairs_needed
from alto_core.store import EventDraft
from alto_core.workspace import Workspace


def open_engine(
    workspace: Workspace,
    job_ids: Sequence[str],
    *,
    num_slots: int,
    reserve: Sequence[str] = (),
    rank_rows: int | None = None,
    max_pass_tokens: int | None = None,
) -> AnyEngine:
    """Slots for so many of these jobs at once over the task's backbone. To be closed by the caller.

    Args:
        workspace: the task.
        job_ids: the jobs.
        num_slots: most of them at a time.
        reserve: jobs of which any one fits in their place.
        rank_rows: upper bound on the sum of their LoRA ranks; None: what the largest ones need.
        max_pass_tokens: of one training pass; None: by kind of device.
    """
    jobs, spare = ([workspace.jobs[job_id] for job_id in ids] for ids in (job_ids, reserve))
    ranks = workspace.ranks()
    num_ranks = 1 if ranks is None else len(ranks)
    largest = sorted((job.rank_rows for job in jobs), reverse=True)[: -(-num_slots // num_ranks)]
    widest = max(job.rank_rows for job in (*jobs, *spare))
    needed = max(sum(largest), widest)
    rows_per_rank = min(needed, (rank_rows or needed * num_ranks) // num_ranks)
    # of the whole task: an engine of the survivors runs the kernels that are compiled already
    widest_of_all = max(job.rank_rows for job in workspace.jobs.values())
    data = workspace.data

    def make() -> AnyEngine:
        options: dict[str, Any] = {
            "num_slots": num_slots,
            "rank_rows": rows_per_rank,
            "max_lora_rank": min(widest_of_all, rows_per_rank),
            "max_pass_tokens": max_pass_tokens,
            "max_row_tokens": max(row.longest_side for row in (*data.train.rows, *data.validation.rows)),
            "objective": objective_of(workspace),
            "recomputed": workspace.task.activation_checkpointing,
            "cuda_graph": workspace.settings.cuda_graph,
        }
        if ranks is not None:  # such a task has no job that needs measures
            targets = sorted({name for job in (*jobs, *spare) for name in job.target_modules})
            return ParallelEngine(ranks, target_modules=targets, **options)
        backbone, measures = load_backbone(workspace.task.model, workspace.device), task_measures(workspace)
        targets = adapted_names((*jobs, *spare), backbone.layers, measures)
        return Engine(backbone, target_modules=targets, measures=measures, **options)

    engine = make()
    try:
        has_more = measure_references(workspace, engine)
    except BaseException:
        engine.close()
        raise
    if has_more and ranks is not None:  # they have the objective as it was
        engine.close()
        engine = make()
    return engine


def task_measures(workspace: Workspace) -> Mapping[str, LayerMeasure]:
    """Of the backbone's layers on the task's rows, by name; measured where a job needs them and nobody has yet."""
    return measures_of(workspace, objective_of(workspace), partial(measure_references, workspace))


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


def measure_references(workspace: Workspace, engine: AnyEngine) -> bool:
    """Complete what the objective needs, in an engine that holds no job yet. Mostly it is on disk already.

    Returns:
        Whether something was missing.

    Raises:
        TaskStopped: as the task was asked to; what was measured is kept.
    """
    if workspace.references is None:
        return False
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
    return count > 0
