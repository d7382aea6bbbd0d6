"""Paths made of names that came from outside: they stay under their folder, or there is no path."""

from __future__ import annotations

import re
from pathlib import Path

from alto_core.errors import StoreError

_PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"
"""ASCII letters and digits, as in ids of tasks and jobs: no separator, no leading dot, no look-alike letter."""


def inside(folder: Path, *names: str) -> Path:
    """`folder/name/...`, which need not exist.

    Args:
        folder: what must not be left; it may itself be reached through a symbolic link.
        names: one for each level below it.

    Raises:
        StoreError: a name is none, or a symbolic link on the way leads out of the folder.
    """
    for name in names:
        if not re.fullmatch(_PLAIN_NAME, name):
            raise StoreError(
                f"{name!r}: got no name of a folder, expected up to 128 letters, digits, '.', '_', '+' or '-', "
                "a letter or digit first"
            )
    path = folder.joinpath(*names)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise StoreError(
            f"{path}: got a symbolic link that leads to {path.resolve()}, expected a path inside {folder}. "
            "Move what it points to here, or set ALTO_HOME to where it is."
        )
    return path
