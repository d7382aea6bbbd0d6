"""Delivers what tasks left in their spools: their process died, or MLflow was away until they ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from alto_core.errors import TrackingError
from alto_core.settings import Settings
from alto_core.tracking.connection import Connection, UnreachableError
from alto_core.tracking.delivery import Delivery
from alto_core.tracking.runs import SPOOL_FOLDER
from alto_core.tracking.spool import Spool


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """What one task had left behind, and what became of it."""

    task_id: str
    text: str
    """One sentence for people."""


def deliver_left_behind(settings: Settings) -> tuple[LeftBehind, ...]:
    """Send what waits in the spools of all tasks, except where a process is sending. Safe to do from several places.

    Raises:
        TrackingError: the embedded database cannot be used.
    """
    waiting = [folder for folder in sorted(settings.tasks_folder.glob(f"*/{SPOOL_FOLDER}")) if _waits(folder)]
    if not waiting:
        return ()
    connection = Connection(settings)
    found = []
    for folder in waiting:
        lock = Spool(folder).lock()
        try:
            with lock.acquire(timeout=0):
                found.append(LeftBehind(task_id=folder.parent.name, text=_deliver(connection, folder)))
        except Timeout:
            continue
    return tuple(found)


def _waits(folder: Path) -> bool:
    spool = Spool(folder)
    return spool.cursor < spool.end


def _deliver(connection: Connection, folder: Path) -> str:
    spool, refused = Spool(folder), list[TrackingError]()
    delivery = Delivery(connection, spool, folder.parent)
    start = delivery.delivered
    try:
        while delivery.holds() or _more_comes(delivery):
            try:
                delivery.send()
            except UnreachableError:
                raise
            except TrackingError as error:
                refused.append(error)
    except UnreachableError as error:
        text = f"{(spool.end - delivery.delivered) / 1024:.0f} KiB for MLflow still wait in {folder}: {error}"
    else:
        text = f"{(delivery.delivered - start) / 1024:.0f} KiB that it had logged were delivered to MLflow"
    delivery.note()
    return text if not refused else f"{text}; {len(refused)} writes were refused, the first: {refused[0]}"


def _more_comes(delivery: Delivery) -> bool:
    delivery.note()
    delivery.read_ahead()
    return delivery.holds()
