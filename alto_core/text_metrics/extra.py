"""Metrics whose library is an extra of the package."""

from __future__ import annotations

import importlib
from typing import Any

from alto_core.errors import TaskFileError


def import_extra(module: str, *, metric: str) -> Any:
    """Import a module of the extra `text-metrics`.

    Raises:
        TaskFileError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise TaskFileError(
            "evaluation.metric",
            got=f"{metric}, whose library {module.partition('.')[0]} is not installed",
            expected="an installed one",
            hint="pip install 'alto-lora[text-metrics]'",
        ) from None
