"""JSON that every reader takes: Python would write NaN and Infinity, which are none."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def strict_json(content: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON text in which numbers that are not finite are null; what JSON has no word for is written as its `str`."""
    return json.dumps(_finite(content), allow_nan=False, default=str, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
