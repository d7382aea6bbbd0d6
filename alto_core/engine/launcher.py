"""Starts the processes of ranks, and tells how they ended.

The process that trains has threads and open databases, so it is not forked. It starts this small one once, hands it one
end of each rank's connection, and hears which process that is and, later, how it ended. On the CPU ranks are forked
from here, with all that takes seconds to import imported once. CUDA wants a fresh process for each.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from typing import Any, NoReturn

from alto_core.loading import keep_what_is_loaded, loading

RANK_MODULE = "alto_core.engine.rank_process"


class Launcher:
    """The asking side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "alto_core.engine.launcher", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the asking process
            )
        self._received = b""
        self._statuses: dict[int, int] = {}
        atexit.register(self.close)

    def start(self, connection: int, output: int, device: str) -> int:
        """Start the process of a rank.

        Args:
            connection: descriptor of its end of the connection.
            output: descriptor that it writes to.
            device: of the rank.

        Returns:
            Its process id.

        Raises:
            ChildProcessError: the launcher itself has ended.
        """
        socket.send_fds(self._socket, [json.dumps(device).encode()], [connection, output])
        while (message := self._next(None)) is not None and "started" not in message:
            pass
        if message is None:
            raise ChildProcessError(f"the launcher of ranks ended with exit code {self._process.wait()}")
        return int(message["started"])

    def exit_code(self, process_id: int) -> int | None:
        """How a rank's process ended, as `Popen.returncode` says it; None while it runs."""
        while self._next(0.0) is not None:
            pass
        return self._statuses.get(process_id)

    def wait_for(self, process_id: int, seconds: float) -> bool:
        """Return when a process has ended, or after so many seconds; whether it has ended."""
        while process_id not in self._statuses and self._next(seconds) is not None:
            pass
        return process_id in self._statuses

    def close(self) -> None:
        """Ranks that still run end as well: their connections close with this process at the latest."""
        self._socket.close()
        self._process.wait()

    def _next(self, seconds: float | None) -> dict[str, Any] | None:
        """The next message; None when there is none for so long, or will never be."""
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._socket], [], [], seconds)
            content = self._socket.recv(4096) if ready else b""
            if not content:
                return None
            self._received += content
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "ended" in message:
            self._statuses[message["ended"]] = message["exit_code"]
        return message


def main() -> None:
    """The process: starts what it is asked to, reaps what has ended, and ends with who asks."""
    asking = socket.socket(fileno=int(sys.argv[1]))
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())

    def tell(**message: int) -> None:
        with contextlib.suppress(BrokenPipeError):
            asking.sendall(json.dumps(message).encode() + b"\n")

    while True:
        ready, _, _ = select.select([asking, woken], [], [])
        if woken in ready:
            woken.recv(4096)
        if asking in ready:
            request, descriptors, _, _ = socket.recv_fds(asking, 4096, 2)
            if not request:
                return
            (connection, output), device = descriptors, json.loads(request)
            if device == "cpu":
                with loading():
                    from alto_core.engine import rank_process  # noqa: F401 - before the fork, once for all ranks
                keep_what_is_loaded()
            process_id = os.fork()
            if process_id == 0:
                for ours in (asking, woken, waker):
                    ours.close()
                _become_rank(connection, output, device)
            os.close(connection)
            os.close(output)
            tell(started=process_id)
        while (ended := _reap()) is not None:
            tell(ended=ended[0], exit_code=ended[1])


def _reap() -> tuple[int, int] | None:
    try:
        process_id, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (process_id, os.waitstatus_to_exitcode(status)) if process_id else None


def _become_rank(connection: int, output: int, device: str) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        if device != "cpu":
            os.set_inheritable(connection, True)
            os.execv(sys.executable, [sys.executable, "-m", RANK_MODULE, str(connection)])  # noqa: S606 - our own program
        from alto_core.engine import rank_process

        code = rank_process.run(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
