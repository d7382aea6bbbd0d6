"""The fields that a place in a task file can have, and which of them somebody meant who wrote another."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from alto_core.config.fields import Section
from alto_core.config.task import TuningTask


def fields_at(keys: Sequence[int | str]) -> tuple[str, ...]:
    """Names of the fields of the section at the end of these keys, required ones first; none where there is no section.

    Args:
        keys: from the outside in, for example `("search_space",)`; indices of lists count for nothing.
    """
    sections: list[type[Section]] = [TuningTask]
    for key in keys:
        if isinstance(key, str):
            meant = [section.model_fields[key] for section in sections if key in section.model_fields]
            sections = [inner for field in meant for inner in _sections_in(field.annotation)]
    fields = {name: field for section in sections for name, field in section.model_fields.items()}
    return tuple(sorted(fields, key=lambda name: not fields[name].is_required()))


def similar(name: str, known: Sequence[str]) -> str | None:
    """The known name that looks most like this one; None where none does."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _sections_in(annotation: Any) -> Iterator[type[Section]]:
    """The sections that a field of this type can hold, whatever lists, unions and choices stand around them."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_in(part)
