"""What a task began with, its task file and the files that it read; and whether they are the same now.

A task that goes on trains the rows and the jobs that it began with. A file that says something else by now is refused
by the name of the field, so that a change is never passed over without a word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alto_core.config import TuningTask, load_task
from alto_core.errors import TaskFileError
from alto_core.tracking import fingerprint
from alto_core.whole_files import whole_file

FILE_NAME = "inputs.json"
HINT = (
    "A task goes on as it began. Put the old value back, or start the changed task with `alto tune`; "
    "`alto resume --as-recorded` goes on without looking at files."
)


def record_inputs(task: TuningTask, folder: Path, task_file: Path | None) -> None:
    """Note what a task begins with.

    Args:
        task: as it was given.
        folder: of the task.
        task_file: where it stands; None for a task made in Python.
    """
    content = {
        "task_file": None if task_file is None else str(task_file.resolve()),
        "task": task.model_dump(mode="json"),
        "files": {field: _digest(path) for field, path in _files(task)},
    }
    with whole_file(folder / FILE_NAME) as file:
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def refuse_changes(folder: Path) -> None:
    """Compare the files with what a task began with. A file that is gone changes nothing: its content was kept.

    Raises:
        TaskFileError: a field of the task file, or a file that a field names, has changed; or the task file is wrong.
    """
    if not (folder / FILE_NAME).is_file():
        return  # begun by a version that noted nothing
    content = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    task_file = content["task_file"] and Path(content["task_file"])
    if task_file and task_file.is_file():
        before, now = dict(_fields(content["task"])), dict(_fields(load_task(task_file).model_dump(mode="json")))
        for field in sorted(before.keys() | now.keys()):
            if before.get(field) != now.get(field):
                raise TaskFileError(
                    field,
                    got=repr(now.get(field)),
                    expected=f"{before.get(field)!r}, as when the task began",
                    hint=HINT,
                    file=task_file,
                )
    for field, path in _files(TuningTask.model_validate(content["task"])):
        before_digest = content["files"].get(field)
        if before_digest and before_digest != _digest(path):
            raise TaskFileError(
                field,
                got=f"{path}, whose content has changed",
                expected="the content that the task began with",
                hint=HINT,
            )


def _files(task: TuningTask) -> Iterator[tuple[str, Path]]:
    """Local files and folders that a task reads, by the field that names them."""
    splits = {"data.validation.source": task.data.validation, "data.test.source": task.data.test}
    named = {
        "data.source": task.data.source,
        **{field: split.source for field, split in splits.items() if split is not None},
        "model.name": task.model.name,
        "init_adapter": task.init_adapter,
    }
    for field, name in named.items():
        if name is not None and Path(name).exists():
            yield field, Path(name)


def _digest(path: Path) -> str:
    """Of a file's content; of a folder's configuration and parts of its weights, which may be very large."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256(fingerprint(path).encode())
    for file_path in sorted(path.glob("*.json")):
        digest.update(file_path.name.encode() + file_path.read_bytes())
    return digest.hexdigest()


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings by their dotted names."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _fields(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
