"""Constants of the early-exit rules: a default and a range for each, checked wherever the values come from.

Each preset declares its constants with `constant`; `policy.make_policy` applies a task file's overrides.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from alto_core.errors import TaskFileError


@dataclass(frozen=True)
class Range:
    """The numbers a constant may take: `low < value <= high`, or `low <= value <= high` when `low_included`."""

    low: float
    high: float = math.inf
    low_included: bool = False

    def holds(self, value: float) -> bool:
        above = value >= self.low if self.low_included else value > self.low
        return math.isfinite(value) and above and value <= self.high

    def __str__(self) -> str:
        left = f"{'[' if self.low_included else '('}{self.low:g}"
        return f"in {left}, {self.high:g}{')' if math.isinf(self.high) else ']'}"


SHARE = Range(0, 1)
COUNT = Range(1, low_included=True)
NON_NEGATIVE = Range(0, low_included=True)


def constant(default: float, allowed: Range) -> Any:
    """A dataclass field with a range. An integer default makes it a count: 2.5 is refused."""
    return dataclasses.field(default=default, metadata={"allowed": allowed})


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the dataclasses of constants share: a check at construction, and overrides by name.

    Raises:
        TaskFileError: a constant is out of its range; names `early_exit.overrides.NAME`.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))

    @classmethod
    def with_overrides(cls, overrides: Mapping[str, float]) -> Self:
        """The defaults with these constants changed.

        Raises:
            TaskFileError: an unknown name, or a value out of its range; names `early_exit.overrides.NAME`.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in overrides:
            if name not in known:
                expected = f"one of {', '.join(known)}" if known else "no override: this preset has no constants"
                raise TaskFileError(f"early_exit.overrides.{name}", got="an unknown constant", expected=expected)
        return cls(**overrides)


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    allowed: Range = field.metadata["allowed"]
    is_count = isinstance(field.default, int)
    of_type = isinstance(value, int if is_count else int | float) and not isinstance(value, bool)
    if not of_type or not allowed.holds(value):
        kind = "a whole number" if is_count else "a number"
        raise TaskFileError(f"early_exit.overrides.{field.name}", got=repr(value), expected=f"{kind} {allowed}")
