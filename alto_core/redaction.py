"""Takes secrets out of text that leaves the process: errors, records, parameters, reports.

Two kinds are known: logins and keys inside URLs, and the values of environment variables that are named like secrets.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping

HIDDEN = "***"

_URL_LOGIN = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]*://)[^/\s'\"<>]*@")
_URL_KEY = re.compile(
    r"([?&][A-Za-z0-9_.-]*(?:token|password|passwd|secret|signature|sig|key)=)[^&\s'\"<>]+", re.IGNORECASE
)
"""Whole words at the end of a name: `num_tokens` and `lora_r` are no secrets."""
_SECRET_VARIABLE = re.compile(
    r"(?:^|_)(?:TOKEN|PASSWORD|PASSWD|SECRET|SECRET_KEY|ACCESS_KEY|API_KEY|PRIVATE_KEY|AUTH_STRING)$", re.IGNORECASE
)
_PASSWORD_OF_URL = re.compile(r"://[^:@/]*:(.+)@")
"""Also one with a slash or an at sign in it, which `_URL_LOGIN` would cut short."""
MIN_SECRET_LENGTH = 6
"""Shorter values are left alone: taking every `true` or `4` out of a text would hide what it says."""


def without_secrets(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text with every login, key of a URL, and secret of the environment replaced by `***`."""
    for secret in _secrets(os.environ if environ is None else environ):
        text = text.replace(secret, HIDDEN)
    return _URL_KEY.sub(rf"\1{HIDDEN}", _URL_LOGIN.sub(rf"\1{HIDDEN}@", text))


def has_login(url: str) -> bool:
    """Whether a URL carries a user or a password."""
    return bool(_URL_LOGIN.search(url))


@functools.lru_cache(maxsize=1024)
def _is_secret(variable: str) -> bool:
    return bool(_SECRET_VARIABLE.search(variable))


def _secrets(environ: Mapping[str, str]) -> list[str]:
    """The longest first, so that none is cut in half by a shorter one inside it."""
    found = set()
    for name, value in environ.items():
        if _is_secret(name):
            found.add(value)
            if name.upper().endswith("AUTH_STRING"):  # user:password
                found.add(value.partition(":")[2])
        elif name.upper().endswith(("_URL", "_URI")) and (login := _PASSWORD_OF_URL.search(value)):
            found.add(login[1])
    return sorted((secret for secret in found if len(secret) >= MIN_SECRET_LENGTH), key=len, reverse=True)
