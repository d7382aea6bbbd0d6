"""From a file or a mapping to a checked `TuningTask`; a wrong field becomes a `TaskFileError` that names it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from alto_core.config.fields import FILE_ENDINGS
from alto_core.config.search import STRATEGY_NAMES
from alto_core.config.spelling import fields_at, similar
from alto_core.config.task import SplitSection, TuningTask
from alto_core.config.yaml_text import YamlError, line_of, read_yaml
from alto_core.errors import TaskFileError


def load_task(path: str | Path) -> TuningTask:
    """Read and check a task file. Relative paths in it are taken from the file's folder.

    Raises:
        TaskFileError: the file is missing, is no YAML mapping, or a field is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskFileError("file", got="no such file", expected="a task file in YAML", file=path) from None
    except OSError as error:
        got = error.strerror or str(error)
        raise TaskFileError("file", got=got, expected="a readable UTF-8 text file", file=path) from None
    except UnicodeDecodeError as error:
        got = f"byte 0x{error.object[error.start]:02x}, which is not UTF-8"
        raise TaskFileError(
            "file", got=got, expected="a readable UTF-8 text file", hint="Save it as UTF-8.", file=path
        ) from None
    try:
        content = read_yaml(text)
    except YamlError as error:
        raise TaskFileError(
            "file", got=str(error), expected="valid YAML", hint=error.hint, file=path, line=error.line
        ) from None
    task = parse_task(content, file=path, text=text)
    return _with_absolute_paths(task, path.resolve().parent)


def parse_task(content: Any, *, file: Path | str | None = None, text: str | None = None) -> TuningTask:
    """Check a mapping with the fields of a task file.

    Args:
        content: the mapping.
        file: that it stands in, for the text of errors.
        text: of that file, so that an error can name the line.

    Raises:
        TaskFileError: names the first wrong field, what it held, and what is expected.
    """
    if not isinstance(content, dict):
        got = "an empty file" if content is None else f"a {'list' if isinstance(content, list) else 'single value'}"
        raise TaskFileError("file", got=got, expected="a mapping of fields such as `name:` and `model:`", file=file)
    content = _with_default_strategy(content)
    try:
        return TuningTask.model_validate(content)
    except ValidationError as error:
        raise _as_task_file_error(error, file, text) from None


def _with_default_strategy(content: dict[Any, Any]) -> dict[Any, Any]:
    """`strategy` may be left out: a list of jobs is a list, all else is a grid."""
    space = content.get("search_space")
    if isinstance(space, dict) and "strategy" not in space:
        return {**content, "search_space": {**space, "strategy": "list" if "jobs" in space else "grid"}}
    return content


def _as_task_file_error(error: ValidationError, file: Path | str | None, text: str | None) -> TaskFileError:
    errors = error.errors()
    # a misspelled key comes as an unknown one and, before it, as a missing one: what was written says more
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    keys = [part for part in first["loc"] if not _is_union_tag(part)]
    field = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".") or "file"
    got, expected, hint = _shorten(first["input"]), first["msg"].removeprefix("Value error, "), ""
    match first["type"]:
        case "extra_forbidden":
            near = similar(str(keys[-1]), fields_at(keys[:-1]))
            got, expected, hint = (
                "an unknown key",
                "a known one",
                f"Perhaps `{near}`?" if near else "Check the spelling.",
            )
        case "missing":
            got, expected, hint = "nothing", "a value", "Add this field."
        case "model_type" | "model_attributes_type":
            example = next(iter(fields_at(keys)), "field")
            expected = f"a section of fields, for example `{keys[-1]}: {{{example}: ...}}`"
        case _ if _is_quoted_number(first["input"]):
            hint = "Remove the quotes around the number."
    expected = expected.removeprefix("Input should be ")
    line = line_of(text, keys) if text is not None and keys else None
    return TaskFileError(field, got=got, expected=expected, hint=hint, file=file, line=line)


def _is_union_tag(part: int | str) -> bool:
    """pydantic puts the names of union branches into the location; they mean nothing to a user."""
    return isinstance(part, str) and (part in STRATEGY_NAMES or "[" in part or part == "LogRange")


def _is_quoted_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def _shorten(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _with_absolute_paths(task: TuningTask, folder: Path) -> TuningTask:
    """Turn each relative name that exists beside the task file into an absolute path; all else stays a hub id."""

    def resolve(name: str | None) -> str | None:
        if name is None:
            return None
        candidate = folder / Path(name).expanduser()
        looks_local = name.startswith((".", "/", "~")) or Path(name).suffix in FILE_ENDINGS
        return str(candidate.resolve()) if looks_local or candidate.exists() else name

    def resolve_split(split: SplitSection | None) -> SplitSection | None:
        return split and split.model_copy(update={"source": resolve(split.source)})

    data = task.data.model_copy(
        update={
            "source": resolve(task.data.source),
            "validation": resolve_split(task.data.validation),
            "test": resolve_split(task.data.test),
        }
    )
    model = task.model.model_copy(update={"name": resolve(task.model.name)})
    return task.model_copy(update={"data": data, "model": model, "init_adapter": resolve(task.init_adapter)})
