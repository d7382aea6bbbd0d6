"""Field types that sections share: names, bounded finite numbers, one-or-many values; and the base of a section."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from alto_core.redaction import has_login

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""Names become folders, MLflow keys and URLs: letters, digits, dot, dash, underscore; no leading dot."""


FILE_ENDINGS = (".jsonl", ".json", ".csv", ".parquet")
"""Of data files. Any other name may be a hub data set."""
RESERVED_NAMES = frozenset(
    {"con", "prn", "aux", "nul", *(f"{device}{i}" for device in ("com", "lpt") for i in range(10))}
)
"""No file may be called so on a Windows file system, with any ending, and homes and exports lie on shared disks."""


def _check_name(value: str) -> str:
    if not re.fullmatch(NAME_PATTERN, value):
        raise ValueError("a name of 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit")
    if value.partition(".")[0].lower() in RESERVED_NAMES or value.endswith("."):
        raise ValueError("a name that every file system takes: not `con` and the like, no dot at the end")
    return value


def _check_owner(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}", value):
        raise ValueError(
            "a name of 1 to 128 letters, digits, '.', '_', '@', '+' or '-', starting with a letter or digit"
        )
    return value


def _check_source(value: str) -> str:
    if has_login(value):
        raise ValueError("no user or password inside an address, for it would be recorded: log in by environment")
    if "\0" in value:
        raise ValueError("a name without a NUL character")
    return value


def _check_finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("a finite number")
    return value


def _check_moment(value: Any) -> Any:
    """YAML reads a timestamp by itself; JSON brings it as text. Kept as text in UTC."""
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if not isinstance(moment, datetime) or moment.tzinfo is None:
            raise ValueError
    except ValueError:
        raise ValueError("a date and a time with a time zone, such as 2030-01-31T18:00:00+01:00") from None
    return moment.astimezone(UTC).isoformat()


def _check_num_gpus(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 1):
        raise ValueError("a whole number of at least 1, or `auto`")
    return value


def one_or_more(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def one_of(names: Iterable[str]) -> Any:
    """One of these names, as `Literal` has it; for those that stand in a registry."""
    return Literal[tuple(names)]


def unique(values: list[Any]) -> list[Any]:
    if len({repr(v) for v in values}) != len(values):
        raise ValueError("values without repetition")
    return values


Name = Annotated[str, AfterValidator(_check_name)]
Owner = Annotated[str, AfterValidator(_check_owner)]
"""As login names are, e-mail addresses among them."""
Source = Annotated[str, Field(min_length=1), AfterValidator(_check_source)]
"""A path or a hub id."""
Moment = Annotated[str, BeforeValidator(_check_moment)]
Positive = Annotated[float, Field(gt=0), AfterValidator(_check_finite)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_check_finite)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
OpenFraction = Annotated[float, Field(gt=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
NumGpus = Annotated[int | Literal["auto"], BeforeValidator(_check_num_gpus)]
LoraRank = Annotated[int, Field(ge=1, le=1024)]
ModuleNames = Annotated[list[str], BeforeValidator(one_or_more), Field(min_length=1), AfterValidator(unique)]


class Section(BaseModel):
    """Unknown keys are refused, and no value is coerced: `true` is not 1, `"8"` is not 8."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
