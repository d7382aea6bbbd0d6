"""Python imports this when its folder is on PYTHONPATH: connections to any other machine are refused, and noted.

What is refused is appended to the file that `LOOPBACK_ONLY_LOG` names. Looking up a name elsewhere counts as well.
"""

import os
import socket
import sys
from pathlib import Path

LOCAL_NAMES = {"", "localhost", "0.0.0.0", "::", "::1", socket.gethostname(), socket.getfqdn()}


def is_local(host: object) -> bool:
    text = host.decode() if isinstance(host, bytes) else str(host or "")
    return text in LOCAL_NAMES or text.startswith("127.")


def watch(event: str, arguments: tuple) -> None:
    host: object = None
    if event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):  # else a path on this machine
        host = arguments[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    if not is_local(host):
        with Path(os.environ["LOOPBACK_ONLY_LOG"]).open("a") as log:
            log.write(f"{event} {host} by {' '.join(sys.orig_argv)[:200]}\n")
        raise OSError(f"{event} to {host} is refused")


sys.addaudithook(watch)
