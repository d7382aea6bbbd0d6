"""Writing a file or a folder so that it is either there whole or not there: temporary sibling, fsync, rename."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"


@contextmanager
def whole_file(target: Path, *, flush: bool = True) -> Iterator[Path]:
    """Give a path to write to; when the block ends well, that file becomes `target`, replacing what was there.

    When the block raises, or the process dies, `target` stays as it was. Readers see the old file or the new one.

    Args:
        target: the file; its folder is made.
        flush: outlive a power cut. False where an older file, or none, does no harm, and waiting for the disk would.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # of this process, so that two may write at once; the name's end is none that readers look for
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield temporary
        if flush:
            _flush(temporary)
        temporary.replace(target)
        if flush:
            _flush(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a temporary folder to write into; when the block ends well, it becomes `target`, replacing what was there.

    When the block raises, or the process dies, `target` stays as it was.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}"
    old = target.parent / f"{TEMPORARY_PREFIX}old-{target.name}"
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        _flush(target.parent)
    finally:
        for leftover in (temporary, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
