"""Preference pairs to rows: both sides tokenized as rows of their own, then laid behind one prompt.

Both sides end at the longest row allowed, and only their answers are cut: the prompt's tokens are the same for both, or
the pair is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.data.preference_pairs import PreferencePair
from alto_core.data.report import Reason, UnusableRowError
from alto_core.data.rows import PairRow
from alto_core.data.tokenization import RowInput, RowTokenizer, TokenizedRow


class PairTokenizer:
    """Turns pairs into rows for one model, and keeps count of what a person should be told.

    Args:
        rows: trains the last answer of a row alone.
    """

    def __init__(self, rows: RowTokenizer):
        self._rows = rows
        self._seen: dict[tuple[tuple[int, ...], ...], str] = {}
        self.num_repeated_prompts = 0
        self.num_common_prompts = 0

    def tokenize(self, inputs: Sequence[RowInput]) -> list[TokenizedRow | UnusableRowError]:
        """Tokenize some pairs at once.

        Raises:
            ModelError: neither the template nor the tokenizer has a token to end an answer with.
        """
        sides = []
        for row in inputs:
            assert isinstance(row.parts, PreferencePair)
            sides += [
                RowInput(row_id=row.row_id, origin=row.origin, parts=part)
                for part in (row.parts.chosen, row.parts.rejected)
            ]
        tokenized = self._rows.tokenize(sides)
        results: list[TokenizedRow | UnusableRowError] = []
        for row, chosen, rejected in zip(inputs, tokenized[::2], tokenized[1::2], strict=True):
            try:
                results.append(self._pair(_usable(chosen, "chosen"), _usable(rejected, "rejected")))
            except UnusableRowError as problem:
                results.append(problem)
                continue
            assert isinstance(row.parts, PreferencePair)
            self.num_repeated_prompts += row.parts.repeats_prompt
            self.num_common_prompts += row.parts.has_common_prompt
        return results

    def _pair(self, chosen: TokenizedRow, rejected: TokenizedRow) -> TokenizedRow:
        assert chosen.generation_row is not None and rejected.generation_row is not None
        prompt = chosen.generation_row.prompt_ids
        if rejected.generation_row.prompt_ids != prompt:
            raise UnusableRowError(Reason.PROMPTS_DIFFER, "the template writes another prompt before each answer")
        length = len(prompt)
        answers = [side.row.token_ids[length:] for side in (chosen, rejected)]
        if answers[0] == answers[1]:
            raise UnusableRowError(Reason.IDENTICAL_SIDES, "their tokens are equal, or what is left of them once cut")
        if other := self._seen.get((prompt, answers[1], answers[0])):
            raise UnusableRowError(Reason.SIDES_SWAPPED, f"{other} prefers the other of the same two answers")
        self._seen.setdefault((prompt, answers[0], answers[1]), chosen.row.origin)
        row = PairRow(
            row_id=chosen.row.row_id,
            origin=chosen.row.origin,
            token_ids=prompt + answers[0] + answers[1],
            label_mask=chosen.row.label_mask + rejected.row.label_mask[length:],
            prompt_length=length,
            rejected_start=length + len(answers[0]),
        )
        return TokenizedRow(row=row, generation_row=chosen.generation_row)


def _usable(side: TokenizedRow | UnusableRowError, name: str) -> TokenizedRow:
    if isinstance(side, UnusableRowError):
        raise UnusableRowError(side.reason, f"{name}: {side.detail}" if side.detail else name, side.field)
    return side
