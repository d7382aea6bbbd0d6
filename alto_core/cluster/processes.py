"""Processes of this host, by their ids."""

from __future__ import annotations

import psutil


def is_gone(process_id: int) -> bool:
    """Whether a process has ended; a zombie, which only waits to be noticed, holds no GPU."""
    try:
        return psutil.Process(process_id).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
