"""A child process that is not to outlive this one, whatever ends it: SIGKILL leaves no time to end one's children."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable

_WAIT_THEN_END = 'read -r _ || kill "$1" 2>/dev/null'
"""`read` fails when the other end of the pipe is closed, and the system closes it when its process is gone."""


def end_with_this_process(pid: int) -> Callable[[], None]:
    """From now on the process `pid` gets SIGTERM when this one is gone, unless what is returned was called before.

    A shell waits for that at the other end of a pipe. Ctrl-C, and the hang-up of a terminal that is closed, reach all
    processes of a command and do not end the shell: a blocked signal stays blocked in a child.
    """
    waits, held_until_the_end = os.pipe()
    try:
        os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _WAIT_THEN_END, "sh", str(pid)],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, waits, 0)],
            setsigmask=[signal.SIGINT, signal.SIGHUP],
        )
    finally:
        os.close(waits)

    @functools.cache
    def call_off() -> None:
        os.write(held_until_the_end, b"\n")
        os.close(held_until_the_end)

    return call_off
