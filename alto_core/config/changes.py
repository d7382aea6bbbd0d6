"""A task with some values changed, as `--set key=value` asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alto_core.config.loading import parse_task
from alto_core.config.task import TuningTask
from alto_core.config.yaml_text import read_yaml
from alto_core.errors import TaskFileError


def with_changes(task: TuningTask, changes: Sequence[str]) -> TuningTask:
    """Set fields by their dotted names; values are YAML, for example `search_space.lora_rank=[8, 16]`.

    Raises:
        TaskFileError: a change is not of that form, or the task would be wrong with it.
    """
    content: dict[str, Any] = task.model_dump(mode="json", exclude_none=True)
    for change in changes:
        key, separator, text = change.partition("=")
        if not separator or not all(key.split(".")):
            raise TaskFileError("--set", got=change, expected="key=value, for example budget.epochs=2")
        try:
            value = read_yaml(text)
        except ValueError:
            raise TaskFileError("--set", got=change, expected="a value in YAML behind the =") from None
        *path, name = key.split(".")
        section = content
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise TaskFileError(key, got=f"{part}, which is no section", expected="a dotted name of a field")
        section[name] = value
    return parse_task(content)
