"""A metric of the user's own: a Python function by its import path. It runs only where the task file allows it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from alto_core.errors import TaskFileError


class UserFunction:
    """Calls `function(answer, reference)`, which returns a number in [0, 1].

    Args:
        path: `package.module:name`; the module must be importable.
        is_allowed: nothing is imported otherwise.

    Raises:
        TaskFileError: it is not allowed, or there is no such function.
    """

    def __init__(self, path: str, *, is_allowed: bool):
        if not is_allowed:
            raise TaskFileError(
                "evaluation.function",
                got=f"{path}, which is Python code",
                expected="`allow_function: true` beside it",
                hint="Set it only if you trust that code: it runs with your rights.",
            )
        self._path, self._function = path, _load(path)

    def score(self, answer: str, reference: str) -> float:
        """Raises TaskFileError where the function raises, or gives anything else than a number in [0, 1]."""
        try:
            value = self._function(answer, reference)
        except Exception as error:  # whatever a person's own code raises
            raise TaskFileError(
                "evaluation.function",
                got=f"{type(error).__name__}: {error} from {self._path} for the answer {answer[:80]!r}",
                expected="a number from 0 to 1",
            ) from error
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise TaskFileError(
                "evaluation.function",
                got=f"{value!r} from {self._path} for the answer {answer[:80]!r}",
                expected="a number from 0 to 1",
            )
        return float(value)

    def reference_problem(self, reference: str) -> str | None:
        return None


def _load(path: str) -> Callable[[str, str], Any]:
    module_name, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise TaskFileError(
            "evaluation.function",
            got=f"{path}, which cannot be imported ({error})",
            expected="`package.module:function`",
            hint="Install its package, or put its folder into PYTHONPATH.",
        ) from None
    if not callable(function):
        raise TaskFileError("evaluation.function", got=f"{path}, a {type(function).__name__}", expected="a function")
    return function
