"""Strict numeric match, by GSM8K's rule: the number behind `####` counts, and nothing else does.

An answer without the mark is wrong, even if the number stands somewhere in it. The first mark counts, so that a model
which goes on with a question of its own is judged by its answer. Thousands separators are left out and numbers are
compared as numbers: `1,000`, `1000` and `1000.0` are equal.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_MARKED = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)")
_WHOLE = re.compile(r"\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+)\s*")


class Numeric:
    """1 where the marked number of the answer is that of the reference. A reference may be the bare number."""

    def score(self, answer: str, reference: str) -> float:
        wanted = _reference_number(reference)
        return float(wanted is not None and _number(_MARKED.search(answer)) == wanted)

    def reference_problem(self, reference: str) -> str | None:
        if _reference_number(reference) is None:
            return "without a number behind `####`, which is no number itself either"
        return None


def _reference_number(reference: str) -> Decimal | None:
    return _number(_MARKED.search(reference) or _WHOLE.fullmatch(reference))


def _number(found: re.Match[str] | None) -> Decimal | None:
    if found is None:
        return None
    try:
        return Decimal(found[1].replace(",", ""))
    except InvalidOperation:
        return None
