"""Where a command writes: strict JSON, and a stdout that belongs to it alone."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any


@contextlib.contextmanager
def stdout_for(as_json: bool) -> Iterator[IO[str]]:
    """The stream to write to. With `as_json` only the caller reaches stdout: prints of libraries go to stderr."""
    stream = sys.stdout
    if not as_json:
        yield stream
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield stream


def dump(content: Mapping[str, Any]) -> str:
    """One line of strict JSON: numbers that are not finite become null."""
    return json.dumps(_clean(content), allow_nan=False, default=str)


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
