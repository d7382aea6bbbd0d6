"""The Prefect server that a command starts for itself where none is set up."""

from __future__ import annotations

import contextlib
import signal
import threading

from prefect.settings import get_current_settings

from flows.end_together import end_with_this_process

_starting = threading.Lock()


def begin_embedded_server() -> None:
    """Start it beside whatever this thread does next: it takes some seconds until it answers.

    What goes wrong shows in `start_embedded_server`, which waits for it and tries again.
    """
    if not _is_wanted():
        return
    import prefect.server.api.server  # noqa: F401  # here, since two threads are not to import at a time

    threading.Thread(target=_begin, name="embedded Prefect server", daemon=True).start()


def start_embedded_server() -> None:
    """Start it now, out of reach of Ctrl-C, if flows of this process are going to use one; it ends with the process.

    Prefect ends it at the exit of this process, which one that is killed does not come to.

    A terminal sends Ctrl-C to every process of a command. A server that ends on it is gone before the flow run could be
    told that it was cancelled. A blocked signal stays blocked in a child, and SIGTERM, which ends it later, is not.
    """
    if not _is_wanted():
        return
    from prefect.server.api.server import SubprocessASGIServer  # the one that Prefect's clients would start

    with _starting:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            server = SubprocessASGIServer()
            if not server.running:
                server.start()
                assert server.server_process is not None
                end_with_this_process(server.server_process.pid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    with contextlib.suppress(Exception):
        start_embedded_server()


def _is_wanted() -> bool:
    settings = get_current_settings()
    return settings.api.url is None and bool(settings.server.ephemeral.enabled)
