"""The exceptions a user can meet.

    AltoError
    ├── TaskFileError      the task file or a setting is wrong: file, field, got, expected, what to do
    ├── DataError          the data set cannot be used: file, row, reason
    ├── ModelError         the base model cannot be loaded or adapted
    ├── EngineError        training cannot go on (no memory for the smallest job, non-finite backbone)
    │   └── RankLostError  a process that trained on one of several devices died
    ├── TrackingError      MLflow cannot be reached or refused a write
    │   └── UnreachableError   it stayed away, and what waits for it is kept (`alto_core.tracking.connection`)
    ├── StoreError         the local store has no such task, or is of another version
    ├── OwnerError         the task or the adapter is someone else's
    └── ServiceError       a server that a command starts could not be started (`flows.cli.services`)

Broken invariants of our own are plain `assert`s; they are bugs, not errors of the user.
"""

from __future__ import annotations

from pathlib import Path

from alto_core.redaction import without_secrets


class AltoError(Exception):
    """Base of every error that ALTO raises on purpose. The command line prints its text and exits with `exit_code`.

    Errors are printed, logged and recorded, and quote what libraries say, so their text holds no secret.
    """

    exit_code = 1

    def __init__(self, text: str = ""):
        super().__init__(without_secrets(text))


class TaskFileError(AltoError):
    """A field of a task file or a setting is wrong.

    Args:
        field: dotted path of the field, for example `search_space.lora_rank[1]`.
        got: the value found, as text.
        expected: what would be right.
        hint: what to do about it.
        file: the file it stands in; None for values made in Python.
        line: of that file, from 1; None where no line says more than another.
    """

    exit_code = 2

    def __init__(
        self,
        field: str,
        *,
        got: str,
        expected: str,
        hint: str = "",
        file: Path | str | None = None,
        line: int | None = None,
    ):
        self.field, self.got, self.expected, self.hint, self.file, self.line = field, got, expected, hint, file, line
        where = f"{file}:{line}" if file and line else file
        place = f"{where}: {field}" if where else field
        text = f"{place}: got {got}, expected {expected}"
        super().__init__(f"{text}. {hint}" if hint else text)


class DataError(AltoError):
    """The data set cannot be used. The text names the file, the row where there is one, and the reason."""

    exit_code = 3


class ModelError(AltoError):
    """The base model cannot be loaded, or a requested layer does not exist in it."""

    exit_code = 4


class EngineError(AltoError):
    """Training cannot go on for a reason that is not one job's own."""

    exit_code = 5


class RankLostError(EngineError):
    """A process that trained on one of several devices died; the task can go on from its checkpoints."""


class TrackingError(AltoError):
    """MLflow cannot be reached, or refused what was written."""

    exit_code = 6


class StoreError(AltoError):
    """The local store lacks what was asked for, or was written by another version."""

    exit_code = 7


class OwnerError(AltoError):
    """Who asks may not change this: it belongs to someone else."""

    exit_code = 8


def first_line(error: Exception) -> str:
    """What a library's error says, without further lines and the full stop; its kind if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
