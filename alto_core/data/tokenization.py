"""Checked row parts to token rows: what is trained, where the prompt ends, which token stops an answer.

Rules: of a chat every assistant turn is trained, of a prompt and completion the completion, of a plain text all of it;
each with its stop token, exactly once. The prompt's ids that generation starts from are a prefix of the row's ids.
Preference pairs are put together from such rows by `pair_tokenization`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alto_core.data.chat import render_chat, render_user_turn
from alto_core.data.formats import Chat, PromptCompletion, RowParts, Turn
from alto_core.data.preference_pairs import PreferencePair
from alto_core.data.report import Reason, UnusableRowError
from alto_core.data.rows import GenerationRow, TokenRow
from alto_core.data.text_encoder import EncodedText, MarkedText, TextEncoder
from alto_core.data.tokenizer import ModelTokenizer
from alto_core.errors import ModelError


@dataclass(frozen=True, kw_only=True)
class RowInput:
    """One row on its way to tokens."""

    row_id: int
    origin: str
    parts: RowParts | PreferencePair


@dataclass(frozen=True, kw_only=True)
class TokenizedRow:
    """One usable row, in both of its uses."""

    row: TokenRow
    generation_row: GenerationRow | None


@dataclass(frozen=True, kw_only=True)
class _Rendered:
    marked: MarkedText
    leading_ids: tuple[int, ...]
    trailing_ids: tuple[int, ...]
    references: tuple[str, ...]
    """Text of each answer as it stands in the data; empty for plain text."""


class RowTokenizer:
    """Turns row parts into token rows for one model, and keeps count of what a person should be told.

    Args:
        model: the model's tokenizer and limits.
        use_template: render prompts and completions as a chat.
        max_length: longest row in tokens.
        too_long: what happens to a longer one.
        last_answer_only: of a chat only the last assistant turn is trained.
    """

    def __init__(
        self,
        model: ModelTokenizer,
        *,
        use_template: bool,
        max_length: int,
        too_long: Literal["drop", "truncate"],
        last_answer_only: bool = False,
    ):
        self._model, self._max_length, self._too_long = model, max_length, too_long
        self._first_answer = -1 if last_answer_only else 0
        self.uses_template = use_template
        self._encoder = TextEncoder(model.tokenizer, render_user_turn(model.tokenizer) if model.chat_template else "")
        # Equal ids share one int object: 200,000 rows would hold a gigabyte of them otherwise.
        self._ids = list(range(model.num_embeddings))
        self.stop_token_ids: set[int] = set() if model.eos_token_id is None else {model.eos_token_id}
        self.num_truncated = 0
        self.num_shielded = 0
        self.num_cut_chats = 0
        self.num_stops_added = 0
        self.num_stops_spelled = 0

    def tokenize(self, rows: Sequence[RowInput]) -> list[TokenizedRow | UnusableRowError]:
        """Tokenize some rows at once.

        Raises:
            ModelError: neither the template nor the tokenizer has a token to end an answer with.
        """
        results: dict[int, TokenizedRow | UnusableRowError] = {}
        rendered: dict[int, _Rendered] = {}
        for i, row in enumerate(rows):
            try:
                assert not isinstance(row.parts, PreferencePair), "pairs come in as two rows"
                rendered[i] = self._render(row.parts)
            except UnusableRowError as problem:
                results[i] = problem
        encoded = self._encoder.encode([item.marked for item in rendered.values()])
        for (i, item), ids in zip(rendered.items(), encoded, strict=True):
            try:
                results[i] = self._finish(rows[i], item, ids)
            except UnusableRowError as problem:
                results[i] = problem
        return [results[i] for i in range(len(rows))]

    def token_text(self, token_id: int) -> str:
        """A token as people write it."""
        return str(self._model.tokenizer.convert_ids_to_tokens(token_id))

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of some tokens, control tokens spelled out."""
        return str(self._model.tokenizer.decode(token_ids))

    def _render(self, parts: RowParts) -> _Rendered:
        if isinstance(parts, PromptCompletion) and self.uses_template and parts.takes_template:
            turns = (Turn(role="user", content=parts.prompt), Turn(role="assistant", content=parts.completion))
            parts = Chat(turns=turns)
        if isinstance(parts, Chat):
            return self._render_chat(parts)
        stop = (self._eos_token_id(),)
        if isinstance(parts, PromptCompletion):
            prompt, completion = self._encoder.shield(parts.prompt), self._encoder.shield(parts.completion)
            self.num_stops_spelled += self._ends_with_spelled_stop(parts.completion)
            marked = MarkedText(text=prompt + completion, answers=((len(prompt), len(prompt + completion)),))
            references: tuple[str, ...] = (parts.completion,)
        else:
            text = self._encoder.shield(parts.text)
            marked, references = MarkedText(text=text, answers=((0, len(text)),)), ()
        return _Rendered(marked=marked, leading_ids=self._model.leading_ids, trailing_ids=stop, references=references)

    def _render_chat(self, chat: Chat) -> _Rendered:
        rendered = render_chat(self._model.tokenizer, self._encoder, chat)
        trailing: tuple[int, ...] = ()
        if rendered.stop_token is None:
            trailing = (self._eos_token_id(),)
            self.num_stops_added += 1
        else:
            self.stop_token_ids.add(self._encoder.control_id(rendered.stop_token))
        answers = tuple(turn.content for turn in chat.turns if turn.role == "assistant")
        self.num_cut_chats += chat.num_cut_turns > 0
        self.num_stops_spelled += self._ends_with_spelled_stop(answers[-1])
        # A template writes its own BOS token, or wants none.
        return _Rendered(marked=rendered.marked, leading_ids=(), trailing_ids=trailing, references=answers)

    def _finish(self, source: RowInput, rendered: _Rendered, encoded: EncodedText | UnusableRowError) -> TokenizedRow:
        if isinstance(encoded, UnusableRowError):
            raise encoded
        lead = len(rendered.leading_ids)
        answers = [(start + lead, end + lead) for start, end in encoded.answers]
        token_ids = [*rendered.leading_ids, *encoded.token_ids, *rendered.trailing_ids]
        answers[-1] = (answers[-1][0], answers[-1][1] + len(rendered.trailing_ids))
        assert answers[-1][1] == len(token_ids)
        if rendered.references and answers[-1][0] == 0:
            raise UnusableRowError(Reason.EMPTY_PROMPT, "nothing to generate from")
        if max(token_ids) >= self._model.num_embeddings:
            detail = f"id {max(token_ids)}, the model has {self._model.num_embeddings} rows"
            raise UnusableRowError(Reason.OUTSIDE_VOCABULARY, detail)
        self.num_shielded += self._encoder.is_shielded(rendered.marked.text)
        num_tokens = len(token_ids)
        if num_tokens > self._max_length and self._too_long == "drop":
            raise UnusableRowError(Reason.TOO_LONG, f"{num_tokens} tokens, at most {self._max_length}")
        first = self._first_answer
        return self._cut(source, rendered.references[first:], token_ids, answers[first:])

    def _cut(
        self, source: RowInput, references: tuple[str, ...], token_ids: list[int], answers: list[tuple[int, int]]
    ) -> TokenizedRow:
        kept = token_ids[: self._max_length]
        label_mask = [False] * len(kept)
        for start, end in answers:
            first, end = max(start, 1), min(end, len(kept))  # nothing predicts position 0
            label_mask[first:end] = [True] * max(0, end - first)
        if not any(label_mask):
            detail = (
                f"the answer starts at token {answers[0][0] + 1} of {len(token_ids)}, rows end at {self._max_length}"
            )
            raise UnusableRowError(Reason.NO_TRAINED_TOKEN, detail)
        self.num_truncated += len(kept) < len(token_ids)
        shared = tuple(map(self._ids.__getitem__, kept))
        row = TokenRow(row_id=source.row_id, origin=source.origin, token_ids=shared, label_mask=tuple(label_mask))
        last = next((i for i in reversed(range(len(references))) if answers[i][0] < len(kept)), None)
        generation_row = last if last is None else self._generation_row(row, answers[last][0], references[last])
        return TokenizedRow(row=row, generation_row=generation_row)

    def _generation_row(self, row: TokenRow, prompt_length: int, reference: str) -> GenerationRow:
        prompt_ids = row.token_ids[:prompt_length]
        return GenerationRow(row_id=row.row_id, origin=row.origin, prompt_ids=prompt_ids, reference=reference)

    def _eos_token_id(self) -> int:
        eos = self._model.eos_token_id
        if eos is None or eos >= self._model.num_embeddings:
            raise ModelError(
                "model.name: the tokenizer has no end token that the model knows, so no answer could end. "
                "Expected an eos_token, or a chat template that writes a stop token."
            )
        return eos

    def _ends_with_spelled_stop(self, answer: str) -> bool:
        return self._encoder.ends_with_control_token(answer.rstrip()) is not None
