"""Where every job of a stretch of training stands at one moment, on disk: what a task goes on from when its run died.

    TASK/cuts/cut-00000007.json    {"sha256": ..., "cut": {...}}

A job's own state says nothing of the others. Jobs that train together share the passes of every step, so a run that
goes on bit for bit needs them all as they stood beside each other: who was in which rank rows, who waited, in which
order. A cut names steps; the states lie with the jobs. It is written when all of them are on disk, and the two newest
are kept.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alto_core.engine.state_folders import fault_of_state
from alto_core.errors import EngineError
from alto_core.whole_files import whole_file

NUM_KEPT = 2
_FILE = re.compile(r"cut-(\d{8})\.json")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one job stands."""

    job_id: str
    step: int
    """Of its saved state; 0: it has not begun."""
    rank_start: int | None = None
    """First of its rank rows; None: it waits for a slot."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a stretch of training is about; the same in all of its cuts."""

    until: float
    """Share of each job's own budget where it ends."""
    job_ids: tuple[str, ...]
    """Jobs that it began with."""
    reserve: tuple[Place, ...] = ()
    """Parked jobs that may take the slot of one that dies, the best first, where they stood when it began."""

    @property
    def reserve_ids(self) -> tuple[str, ...]:
        return tuple(place.job_id for place in self.reserve)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """All jobs that still have something to train, in the executor's order: those in slots, then those that wait."""

    session: Session
    places: tuple[Place, ...]
    joined: tuple[str, ...] = ()
    """Jobs of the reserve that have taken a slot by now."""

    @property
    def steps(self) -> Mapping[str, int]:
        return {place.job_id: place.step for place in self.places}


class CutLog:
    """The cuts of one task."""

    def __init__(self, folder: Path):
        self._folder = folder

    def write(self, cut: Cut) -> None:
        """Make this the newest cut: there whole, or not there.

        Raises:
            EngineError: it could not be written; the cut before is as it was.
        """
        files = self._files()
        number = _number(files[0]) + 1 if files else 1
        target = self._folder / f"cut-{number:08d}.json"
        content = json.dumps(dataclasses.asdict(cut))
        text = json.dumps({"sha256": _digest(content), "cut": content}, indent=1)
        try:
            with whole_file(target) as file:
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise EngineError(
                f"checkpoint {target}: {len(text)} bytes could not be written ({error}). The one before is as it was. "
                "Make room, then resume the task."
            ) from error
        for old in files[NUM_KEPT - 1 :]:
            old.unlink(missing_ok=True)

    def newest_readable(self) -> Cut | None:
        """The newest cut, whether or not its states are whole; None where there is none."""
        readable, _ = self._readable()
        return readable[0] if readable else None

    def newest_whole(self, states_of: Callable[[str], Path]) -> tuple[Cut | None, tuple[str, ...]]:
        """The newest cut whose states are whole.

        Where a state of the newest is damaged and the cut before belongs to the same stretch and is whole, that one is
        taken, so that all jobs stand beside each other again. Where neither is whole it is the newest: the damaged jobs
        alone go back to an older state.

        Args:
            states_of: folder of a job's states.

        Returns:
            The cut, None where there is none; and what is damaged, one sentence each.
        """
        readable, faults = self._readable()
        for cut in readable:
            if cut.session != readable[0].session:
                break
            damaged = _damaged_states(cut, states_of)
            if not damaged:
                return cut, tuple(faults)
            faults += [f"checkpoint {state} is damaged: the one before it is taken" for state in damaged]
        return (readable[0] if readable else None), tuple(faults)

    def _readable(self) -> tuple[list[Cut], list[str]]:
        """Newest first, and what is damaged."""
        readable, faults = [], []
        for file in self._files():
            try:
                readable.append(_read(file))
            except (OSError, ValueError, KeyError, TypeError) as error:
                faults.append(f"checkpoint {file} is damaged ({error}): the one before it is taken")
        return readable, faults

    def _files(self) -> list[Path]:
        """Newest first."""
        found = self._folder.iterdir() if self._folder.is_dir() else ()
        return sorted((path for path in found if _FILE.fullmatch(path.name)), reverse=True)


def _damaged_states(cut: Cut, states_of: Callable[[str], Path]) -> list[str]:
    faults = (fault_of_state(states_of(place.job_id), place.step) for place in cut.places if place.step)
    return [fault for fault in faults if fault]


def _read(file: Path) -> Cut:
    content = json.loads(file.read_text(encoding="utf-8"))
    if _digest(content["cut"]) != content["sha256"]:
        raise ValueError("its checksum does not match")
    fields: dict[str, Any] = json.loads(content["cut"])
    session = fields["session"]
    return Cut(
        session=Session(
            until=session["until"],
            job_ids=tuple(session["job_ids"]),
            reserve=tuple(Place(**place) for place in session["reserve"]),
        ),
        places=tuple(Place(**place) for place in fields["places"]),
        joined=tuple(fields["joined"]),
    )


def _number(file: Path) -> int:
    match = _FILE.fullmatch(file.name)
    assert match is not None
    return int(match[1])


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
