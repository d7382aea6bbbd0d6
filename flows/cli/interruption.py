"""How a command is told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

CANCELLED_EXIT_CODE = 130
"""Of a command that Ctrl-C or SIGTERM ended: 128 + SIGINT, as shells have it."""


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Inside the block `kill` raises `KeyboardInterrupt`, as Ctrl-C does. Main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handled([signal.SIGTERM], interrupt):
        yield


@contextlib.contextmanager
def lasting_ctrl_c() -> Iterator[Callable[[], None]]:
    """As `sigterm_as_ctrl_c`, for a loop that runs until it is interrupted; it calls what this yields in each round.

    Python drops an exception that is raised in a finalizer. What this yields raises `KeyboardInterrupt` again.
    """
    is_asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal is_asked
        is_asked = True
        raise KeyboardInterrupt

    def check() -> None:
        if is_asked:
            raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has the command ignore it
        numbers.append(signal.SIGINT)
    with _handled(numbers, interrupt):
        yield check


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
