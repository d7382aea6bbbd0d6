"""Where a command writes: a console as wide as its tables need, strict JSON, a stdout that belongs to it alone."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

from rich.console import Console

from alto_core.strict_json import strict_json

PIPE_WIDTH = 140


def console_for(stream: IO[str] | None = None) -> Console:
    """A console on a stream, by default stdout. A file or a pipe has no width; rich's 80 columns would cut tables."""
    stream = stream or sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else PIPE_WIDTH)


@contextlib.contextmanager
def busy(with_what: str) -> Iterator[None]:
    """Say on a terminal what the command does inside the block; elsewhere nothing."""
    console = Console(stderr=True)
    with console.status(with_what) if console.is_terminal else contextlib.nullcontext():
        yield


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
    return strict_json(content)
