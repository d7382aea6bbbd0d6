"""Match of what a pattern finds: for answers whose last line, or one field, is what counts."""

from __future__ import annotations

import re


class Regex:
    """1 where the pattern finds the same in the answer as in the reference, white space at the ends left out.

    What it finds is its first match, there the first group if it has one. A reference in which it finds nothing counts
    as a whole; an answer in which it finds nothing is wrong.
    """

    def __init__(self, pattern: str):
        self._pattern = re.compile(pattern)

    def score(self, answer: str, reference: str) -> float:
        wanted = self._found(reference)
        found = self._found(answer)
        return float(found is not None and found == (reference.strip() if wanted is None else wanted))

    def reference_problem(self, reference: str) -> str | None:
        return None

    def _found(self, text: str) -> str | None:
        match = self._pattern.search(text)
        if match is None:
            return None
        found: str | None = match[1] if self._pattern.groups else match[0]
        return None if found is None else found.strip()
