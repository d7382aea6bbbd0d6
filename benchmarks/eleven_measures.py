"""What a real run of many tasks comes to: makespan, idle GPUs and replanning, by the queue's own log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from cluster_rig import claimed_gpus

from alto_core.store import KeptPlan, QueueEvent

NUM_GPUS = 8
"""That the bars are of."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A task's hold on its GPUs, in seconds after the first submission."""

    task_id: str
    gpus: tuple[int, ...]
    claimed: float
    begun: float | None
    """When its process was there; None: it never was."""
    released: float


def first_submission(events: Iterable[QueueEvent]) -> datetime:
    return min(event.at for event in events if event.kind == "submitted")


def holds(events: Sequence[QueueEvent]) -> list[Hold]:
    """All holds that have ended, in the order of their ends; a task has several where its run died or made room."""
    zero = first_submission(events)
    open_claims: dict[str, QueueEvent] = {}
    begun: dict[str, float] = {}
    found = []
    for event in events:
        seconds = (event.at - zero).total_seconds()
        if event.task_id is None:
            continue
        if event.kind == "claimed":
            open_claims[event.task_id] = event
        elif event.kind == "begun":
            begun[event.task_id] = seconds
        elif event.kind == "released" and event.task_id in open_claims:
            claim = open_claims.pop(event.task_id)
            found.append(
                Hold(
                    task_id=event.task_id,
                    gpus=claimed_gpus(claim),
                    claimed=(claim.at - zero).total_seconds(),
                    begun=begun.pop(event.task_id, None),
                    released=seconds,
                )
            )
    return found


def idle_share(ended: Sequence[Hold], num_gpus: int) -> float:
    """Share of the GPU-seconds up to the last end in which no task held the GPU."""
    held = sum(len(hold.gpus) * (hold.released - hold.claimed) for hold in ended)
    return 1 - held / (num_gpus * max(hold.released for hold in ended))


def replan_seconds(events: Iterable[QueueEvent]) -> list[float]:
    """For each end of a run after which something started before the next end: how long that took."""
    waits, freed = [], None
    for event in events:
        if event.kind == "released":
            freed = event.at
        elif event.kind == "claimed" and freed is not None:
            waits.append((event.at - freed).total_seconds())
            freed = None
    return waits


def covers(plan: KeptPlan, task_ids: Iterable[str]) -> bool:
    """Whether a plan has a place for each of these tasks."""
    return {placement.task_id for placement in plan.placements} >= set(task_ids)


def foreseen_seconds(plan: KeptPlan, zero: datetime) -> float:
    """The makespan that a plan promises, from this moment on."""
    return (max(placement.end for placement in plan.placements) - zero).total_seconds()


def bars(rows: Iterable[Mapping[str, str]]) -> dict[str, float]:
    """Of what real GPUs did at the paper's shapes; variants are held against each other at the same budget alone.

    Args:
        rows: of the table that the benchmark writes.
    """
    whole = [row for row in rows if (row["shape"], row["devices"]) == ("paper", f"{NUM_GPUS} GPUs") and not row["task"]]
    makespans = {(row["variant"], row["share"]): float(row["makespan"]) for row in whole if row["makespan"]}
    found = {}
    for row in whole:
        if row["variant"] != "all" or not row["makespan"]:
            continue
        if ("B", row["share"]) in makespans:
            found["cluster8.all_over_b"] = makespans["B", row["share"]] / float(row["makespan"])
        if row["foreseen"]:
            found["cluster8.predicted_over_real"] = float(row["foreseen"]) / float(row["makespan"])
    return found
