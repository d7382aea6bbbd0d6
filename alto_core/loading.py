"""Imports of large libraries, which Python's garbage collector is kept out of.

torch, transformers, Prefect and MLflow make some half a million objects that stay. The collector would look through all
of them again and again while they come, and three times when the process ends: two of seven seconds of the start of
`alto tune`, and more than one at its end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Inside the block, which does little but import, nothing is collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def keep_what_is_loaded() -> None:
    """No later collection looks at what there is now. Before a process forks or ends."""
    gc.freeze()
