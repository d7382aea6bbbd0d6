"""What a task names must be there: its files of rows and its model's folder. Said before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from alto_core.config import TuningTask, load_task
from alto_core.data.source import check_source
from alto_core.engine.model_folder import check_model_folder, check_weight_files


def read_task(file: Path) -> TuningTask:
    """Read a task file, and look whether what it names is there.

    Raises:
        TaskFileError: the file is missing, or one of its fields is wrong.
        DataError: a source of rows is not there.
        ModelError: the model's folder is not there, or not complete.
    """
    task = load_task(file)
    check_named(task)
    return task


def check_named(task: TuningTask) -> None:
    """Look whether the sources of rows and the model that a task names are there. Names on the hub are not looked up.

    Raises:
        DataError: a source of rows is not there.
        ModelError: the model's folder is not there, or not complete.
    """
    splits = [split for split in (task.data.validation, task.data.test) if split is not None]
    for source in (task.data.source, *(split.source for split in splits)):
        if source is not None:
            check_source(source)
    check_model_folder(task.model.name)
    check_weight_files(task.model.name)
