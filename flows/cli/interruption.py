"""How a command is told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

CANCELLED_EXIT_CODE = 130
"""Of a command that Ctrl-C or SIGTERM ended: 128 + SIGINT, as shells have it."""


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Inside the block `kill` raises `KeyboardInterrupt`, as Ctrl-C does. Main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
