"""The Prefect server that a command starts for itself where none is set up."""

from __future__ import annotations

import signal

from prefect.settings import get_current_settings


def start_embedded_server() -> None:
    """Start it now, out of reach of Ctrl-C, if flows of this process are going to use one; it ends with the process.

    A terminal sends Ctrl-C to every process of a command. A server that ends on it is gone before the flow run could be
    told that it was cancelled. A blocked signal stays blocked in a child, and SIGTERM, which ends it later, is not.
    """
    settings = get_current_settings()
    if settings.api.url is not None or not settings.server.ephemeral.enabled:
        return
    from prefect.server.api.server import SubprocessASGIServer  # the one that Prefect's clients would start

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        SubprocessASGIServer().start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
