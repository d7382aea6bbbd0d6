"""The hub of models and data sets: can it be reached? Asked before its client would try a name for half a minute.

Nothing here is asked for a model or a data set that lies in a folder.
"""

from __future__ import annotations

import os
import socket
import urllib.parse
import urllib.request

PATIENCE_SECONDS = 5.0
"""For a name server or a host that does not answer at all; one that refuses does so at once."""


def go_offline_without_hub() -> str:
    """Why the hub cannot be reached; empty where it can be, or where a proxy stands between and nobody can tell.

    While it cannot, its client is offline: what its cache holds loads at once, and all else is refused at once. Who is
    offline by `HF_HUB_OFFLINE` stays so.
    """
    # here, for at import it reads settings that `prepare_environment` makes
    from huggingface_hub import constants

    wish = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    if wish.upper() in constants.ENV_VARS_TRUE_VALUES:
        return "HF_HUB_OFFLINE is set"
    constants.HF_HUB_OFFLINE = False
    if urllib.request.getproxies():
        return ""
    hub = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        port = hub.port or socket.getservbyname(hub.scheme)
        socket.create_connection((hub.hostname or "", port), timeout=PATIENCE_SECONDS).close()
    except OSError as error:
        constants.HF_HUB_OFFLINE = True
        return f"{hub.netloc} cannot be reached ({error.strerror or error})"
    return ""
