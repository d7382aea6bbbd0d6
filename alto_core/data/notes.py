"""What a person should be told about a prepared data set beyond the counts: stop token, BOS, limits, odd texts."""

from __future__ import annotations

from collections.abc import Sequence

from alto_core.config import DataSection
from alto_core.data.packing import packed_tokens
from alto_core.data.pair_tokenization import PairTokenizer
from alto_core.data.rows import SplitData
from alto_core.data.tokenization import RowTokenizer
from alto_core.data.tokenizer import ModelTokenizer


def preparation_notes(
    data: DataSection, model: ModelTokenizer, row_tokenizer: RowTokenizer, max_length: int
) -> tuple[str, ...]:
    """The notes of a report, after all rows are tokenized."""
    stops = ", ".join(f"{row_tokenizer.token_text(index)} ({index})" for index in sorted(row_tokenizer.stop_token_ids))
    notes = [f"answers end with a stop token: {stops}", _leading_note(model, row_tokenizer)]
    if data.max_length is not None and max_length < data.max_length:
        notes.append(f"rows end at {max_length} tokens, not {data.max_length}: the model has no more positions")
    if row_tokenizer.num_truncated:
        notes.append(f"{row_tokenizer.num_truncated} rows were cut at {max_length} tokens and lack their stop token")
    if row_tokenizer.num_stops_added:
        notes.append("the chat template writes no stop token; the tokenizer's own ends each row")
    if row_tokenizer.num_shielded:
        notes.append(
            f"{row_tokenizer.num_shielded} rows spell control tokens in their text: encoded as plain characters"
        )
    if row_tokenizer.num_stops_spelled:
        notes.append(
            f"{row_tokenizer.num_stops_spelled} answers end with a spelled-out control token, trained as characters"
        )
    if row_tokenizer.num_cut_chats:
        notes.append(f"{row_tokenizer.num_cut_chats} chats do not end on an assistant turn; what follows it was cut")
    if row_tokenizer.uses_template and "strftime_now" in (model.chat_template or ""):
        notes.append("the chat template writes today's date, so the same rows have another digest tomorrow")
    if len(model.tokenizer) > model.num_embeddings:
        notes.append(
            f"the tokenizer has {len(model.tokenizer)} tokens, the model {model.num_embeddings}: "
            "rows that use more are left out"
        )
    return tuple(notes)


def pair_notes(splits: Sequence[SplitData], pairs: PairTokenizer) -> tuple[str, ...]:
    """What else a report on preference pairs should say."""
    rows = [row for split in splits for row in split.rows]
    once = sum(packed_tokens(row, share_prompts=True) for row in rows)
    twice = sum(packed_tokens(row, share_prompts=False) for row in rows)
    notes = [
        f"a prompt is read once for both of its answers: {once} tokens instead of {twice}, "
        f"{100 * (1 - once / twice):.0f} % fewer"
    ]
    if pairs.num_repeated_prompts:
        notes.append(f"{pairs.num_repeated_prompts} pairs repeat their prompt in both answers; it was taken off there")
    if pairs.num_common_prompts:
        notes.append(f"{pairs.num_common_prompts} pairs name no prompt; what both sides begin with was taken for it")
    return tuple(notes)


def _leading_note(model: ModelTokenizer, row_tokenizer: RowTokenizer) -> str:
    if row_tokenizer.uses_template:
        return "rows start as the chat template writes them; the tokenizer adds nothing"
    if model.leading_ids:
        return f"rows start with {' '.join(row_tokenizer.token_text(index) for index in model.leading_ids)}"
    return "rows start without a BOS token, as this tokenizer writes them"
