"""A child process that is not to outlive this one, whatever ends it: SIGKILL leaves no time to end one's children."""

from __future__ import annotations

import os
import signal

_WAIT_THEN_END = 'read -r _; kill "$1" 2>/dev/null'
"""`read` returns when the other end of the pipe is closed, and the system closes it when its process is gone."""


def end_with_this_process(pid: int) -> None:
    """From now on the process `pid` gets SIGTERM when this one is gone.

    A shell waits for that at the other end of a pipe, which nobody writes into. Ctrl-C, which a terminal sends to all
    processes of a command, does not end the shell: a blocked signal stays blocked in a child.
    """
    waits, _held_until_the_end = os.pipe()
    try:
        os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _WAIT_THEN_END, "sh", str(pid)],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, waits, 0)],
            setsigmask=[signal.SIGINT],
        )
    finally:
        os.close(waits)
