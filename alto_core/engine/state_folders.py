"""The folders of a job's training states: which there are, and whether one is whole. Knows no tensor.

    FOLDER/step-00000012/   the files of one state, last the marker complete.json with a checksum of every other file

What the files hold is in `checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from alto_core.errors import EngineError

MARKER = "complete.json"
NUM_KEPT = 2

logger = logging.getLogger(__name__)


def state_folder(folder: Path, step: int) -> Path:
    """Where the state of a step lies under `folder`."""
    return folder / f"step-{step:08d}"


def mark_whole(state: Path) -> None:
    """Write the marker of a state whose files are all there."""
    checksums = _checksums(sorted(state.iterdir()))
    (state / MARKER).write_text(json.dumps({"sha256": checksums}, indent=1), encoding="utf-8")


def newest_step(folder: Path) -> int:
    """Step of the newest state that has its marker; 0 where there is none. Files are not read."""
    return max((_step(marker.parent) for marker in folder.glob(f"step-*/{MARKER}")), default=0)


def newest_whole(folder: Path, step: int | None) -> Path:
    """The newest state whose files are as they were written; a damaged one before it is said in the log.

    Args:
        folder: the states.
        step: take none that is newer; None: any.

    Raises:
        EngineError: none is whole.
    """
    states = [state for state in _states(folder) if step is None or _step(state) <= step]
    for state in states:
        fault = _fault(state)
        if fault is None:
            return state
        logger.warning("checkpoint %s is damaged (%s); trying the one before it", state, fault)
    raise EngineError(f"checkpoint {folder}: expected a whole state, got {len(states)} damaged ones. Restart the job.")


def fault_of_state(folder: Path, step: int) -> str | None:
    """What is wrong with the state of a step under `folder`, its path included; None when it is there and whole."""
    state = state_folder(folder, step)
    fault = _fault(state)
    return fault and f"{state}: {fault}"


def prune(folder: Path, *, keep_from: int | None = None) -> None:
    """Remove states but the two newest, and those of the step `keep_from` and later."""
    for old in _states(folder)[NUM_KEPT:]:
        if keep_from is None or _step(old) < keep_from:
            shutil.rmtree(old, ignore_errors=True)


def _states(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def _step(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def _fault(state: Path) -> str | None:
    """What is wrong with a state; None when it is whole."""
    try:
        checksums = dict(json.loads((state / MARKER).read_text(encoding="utf-8"))["sha256"].items())
    except FileNotFoundError:
        return f"no {MARKER}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError) as error:
        return f"{MARKER}: {error}"
    for name in checksums:
        path = state / name
        if path.parent != state or path.is_symlink():
            return f"{MARKER} names {name!r}, which is no file of its own"
        if not path.is_file():
            return f"no {name}"
    found = _checksums([state / name for name in checksums])
    return next((f"{name} is cut or changed" for name in checksums if found[name] != checksums[name]), None)


def _checksums(paths: Sequence[Path]) -> dict[str, str]:
    """By file name; hashing holds no lock, so the files are read side by side."""
    with ThreadPoolExecutor() as pool:
        return dict(zip((path.name for path in paths), pool.map(_checksum, paths), strict=True))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
