"""Names that MLflow accepts, made from any text and turned back into it.

MLflow takes letters, digits and `_ - . space / :` in the names of metrics, parameters and tags, and refuses the rest.
Every other character, and `:` itself, becomes `:` + its code point in hex + `:`. The map is one to one, so two names
never meet.
"""

from __future__ import annotations

import posixpath
import re

from alto_core.errors import TrackingError

MAX_NAME_LENGTH = 250
"""What MLflow's databases hold."""

_REFUSED = re.compile(r"[^A-Za-z0-9_\-. /]")
_REFUSED_OR_PATH = re.compile(r"[^A-Za-z0-9_\- ]")
_ESCAPED = re.compile(r":([0-9a-f]+):")


def clean_name(name: str) -> str:
    """The name under which MLflow keeps `name`; the same wherever MLflow takes it as it is and it holds no `:`.

    Raises:
        TrackingError: the name is empty, or too long for MLflow.
    """
    clean = _REFUSED.sub(_escape, name)
    if _is_odd_path(clean):
        clean = _REFUSED_OR_PATH.sub(_escape, name)
    if not clean or len(clean) > MAX_NAME_LENGTH:
        raise TrackingError(
            f"name {name[:60]!r}: got {len(clean)} characters as MLflow keeps it, expected 1 to {MAX_NAME_LENGTH}. "
            "Shorten it."
        )
    return clean


def original_name(clean: str) -> str:
    """The text that `clean_name` was given."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), clean)


def _escape(match: re.Match[str]) -> str:
    return f":{ord(match[0]):x}:"


def _is_odd_path(name: str) -> bool:
    """MLflow reads names as paths and refuses those that are not in their shortest form, or leave their folder."""
    return name != "" and (posixpath.normpath(name) != name or name == "." or name.startswith(("/", "..")))
