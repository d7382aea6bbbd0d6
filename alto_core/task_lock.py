"""One process at a time works on a task: a lock that the system takes back when its holder dies, whatever killed it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from alto_core.errors import StoreError
from alto_core.whole_files import whole_file

LOCK_NAME = ".at-work.lock"
HOLDER_NAME = ".at-work.json"


@contextmanager
def held(task_id: str, folder: Path, *, patience_seconds: float = 0.0) -> Iterator[None]:
    """Hold a task alone while the block runs.

    Args:
        task_id: the task.
        folder: its folder.
        patience_seconds: how long to wait for another holder.

    Raises:
        StoreError: another process holds it; names that process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK_NAME)
    try:
        lock.acquire(timeout=patience_seconds)
    except Timeout:
        raise StoreError(f"task {task_id}: {_describe(_read(folder))} is at work on it. Wait for its end.") from None
    try:
        holder = {
            "process_id": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "times_held": times_held(folder) + 1,
        }
        _write(folder, holder)
        yield
    finally:
        lock.release()


@contextmanager
def held_if_free(folder: Path) -> Iterator[bool]:
    """Hold a task while the block runs if nothing is at work on it; yields whether it is held. Names no holder."""
    lock = FileLock(folder / LOCK_NAME)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def was_held_here(folder: Path) -> bool:
    """Whether the process that held a task last, if any, was one of this machine."""
    return _read(folder).get("host", socket.gethostname()) == socket.gethostname()


def times_held(folder: Path) -> int:
    """How often a task was held so far, by runs that ended and by runs that died."""
    return int(_read(folder).get("times_held", 0))


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder['process_id']} on {holder['host']}, since {holder['since']},"


def _read(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / HOLDER_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _write(folder: Path, holder: dict[str, Any]) -> None:
    with whole_file(folder / HOLDER_NAME, flush=False) as note:
        note.write_text(json.dumps(holder), encoding="utf-8")
