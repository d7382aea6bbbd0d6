"""Text to token ids, with control tokens that only a template can write and boundaries that a prompt can be cut at.

A control token is one that the tokenizer finds in text by itself: its special tokens, and other added tokens that mark
a user's turn. A row's own text may spell one (`<|im_end|>`); encoded naively it would end the turn and move the labels.
So such text is *shielded* before a template sees it: each spelling becomes a placeholder. When the finished text is
encoded, the template's control tokens go through aliases, and the placeholders turn back into plain characters.

Texts without placeholders take the tokenizer's ordinary path. The second path uses a copy of the tokenizer that finds
no control tokens, plus the aliases and one boundary token, whose ids are above all others and never leave this room.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from alto_core.data.report import Reason, UnusableRowError


@dataclass(frozen=True, kw_only=True)
class MarkedText:
    """A shielded text and the stretches of it that are trained."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Start and end of each stretch in characters, rising, not empty, not overlapping."""


@dataclass(frozen=True, kw_only=True)
class EncodedText:
    """Token ids and the same stretches, in tokens."""

    token_ids: list[int]
    answers: tuple[tuple[int, int], ...]


class TextEncoder:
    """Encodes marked texts with one tokenizer.

    Args:
        tokenizer: a fast transformers tokenizer.
        turn_text: a rendered user turn; added tokens in it are control tokens even if the tokenizer does not call them
            special.
    """

    def __init__(self, tokenizer: Any, turn_text: str = ""):
        # A copy: the original may carry truncation or padding in its file, and callers may change it.
        self._core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._core.no_truncation()
        self._core.no_padding()
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        # Words and runs of blanks among the added tokens are vocabulary, not marks.
        marks = {name for name in added if name in turn_text and name.strip() and not name.isalnum()}
        names = {name for name in special | marks if name}
        self._control_ids = {name: added[name] for name in names}
        # Ordinary text may become the unknown token, so it proves nothing.
        self._telling_ids = frozenset(self._control_ids.values()) - {tokenizer.unk_token_id}
        self._control_pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")
        # Unpredictable, so that no data set can spell a placeholder; it never reaches a result.
        nonce = secrets.token_hex(8)
        self._placeholder_start = f"\ue000{nonce}"
        self._boundary = f"\ue001{nonce}\ue003"
        self._placeholders = {name: f"{self._placeholder_start}{i:x}\ue003" for i, name in enumerate(sorted(names))}
        self._aliases = {name: f"\ue002{nonce}{i:x}\ue003" for i, name in enumerate(sorted(names))}

    def shield(self, text: str) -> str:
        """Replace each spelled-out control token by a placeholder of its own; any other text comes back as it is."""
        return self._control_pattern.sub(lambda found: self._placeholders[found[0]], text)

    def is_shielded(self, text: str) -> bool:
        """Whether a text holds a placeholder."""
        return self._placeholder_start in text

    def unshield(self, text: str) -> str:
        """The inverse of `shield`."""
        if self.is_shielded(text):
            for name, placeholder in self._placeholders.items():
                text = text.replace(placeholder, name)
        return text

    def control_tokens(self, text: str, start: int = 0) -> Iterable[re.Match[str]]:
        """Control tokens of a shielded text from a position on: those that a template wrote."""
        return self._control_pattern.finditer(text, start)

    def control_id(self, name: str) -> int:
        """Token id of a control token."""
        return self._control_ids[name]

    def ends_with_control_token(self, text: str) -> str | None:
        """The control token that a text ends with."""
        return max((name for name in self._control_ids if text.endswith(name)), key=len, default=None)

    def encode(self, texts: Sequence[MarkedText]) -> list[EncodedText | UnusableRowError]:
        """Encode texts such that the ids before the last answer are what the text before it gives alone.

        Where the tokenizer would join characters across the start of an answer, the text is encoded in pieces instead.
        An `UnusableRowError` stands for a text whose control tokens cannot be told from spelled ones.
        """
        queries = [marked.text for marked in texts] + [marked.text[: marked.answers[-1][0]] for marked in texts]
        encodings = self._core.encode_batch(queries, add_special_tokens=False)
        results: list[EncodedText | UnusableRowError] = []
        for i, marked in enumerate(texts):
            encoded = None
            if not self.is_shielded(marked.text):
                encoded = _whole_encoding(marked, encodings[i], encodings[i + len(texts)].ids)
            results.append(self._checked(marked, encoded or self._encode_in_pieces(marked)))
        return results

    def _checked(self, marked: MarkedText, encoded: EncodedText) -> EncodedText | UnusableRowError:
        written = sum(self._control_ids[found[0]] in self._telling_ids for found in self.control_tokens(marked.text))
        telling = self._telling_ids
        if sum(index in telling for index in encoded.token_ids) != written:
            return UnusableRowError(Reason.CONTROL_TOKEN, "this tokenizer makes control tokens of ordinary characters")
        return encoded

    def _encode_in_pieces(self, marked: MarkedText) -> EncodedText:
        positions = [0, *(position for answer in marked.answers for position in answer), len(marked.text)]
        pieces = [self._literal(marked.text[a:b]) for a, b in itertools.pairwise(positions)]
        core, boundary_id, control_ids = self._literal_core
        token_ids: list[int] = []
        cuts: list[int] = []
        for index in core.encode(self._boundary.join(pieces), add_special_tokens=False).ids:
            if index == boundary_id:
                cuts.append(len(token_ids))
            else:
                token_ids.append(control_ids.get(index, index))
        assert len(cuts) == len(positions) - 2
        return EncodedText(token_ids=token_ids, answers=tuple(zip(cuts[::2], cuts[1::2], strict=True)))

    def _literal(self, text: str) -> str:
        return self.unshield(self._control_pattern.sub(lambda found: self._aliases[found[0]], text))

    @cached_property
    def _literal_core(self) -> tuple[Tokenizer, int, dict[int, int]]:
        """The copy without control tokens, the boundary's id, and the control token of each alias."""
        layout = json.loads(self._core.to_str())
        for token in layout["added_tokens"]:
            token["special"] = token["special"] or token["content"] in self._control_ids
        core = Tokenizer.from_str(json.dumps(layout))
        core.encode_special_tokens = True
        core.add_tokens([AddedToken(name, normalized=False) for name in (self._boundary, *self._aliases.values())])
        new_ids = {token.content: index for index, token in core.get_added_tokens_decoder().items()}
        control_ids = {new_ids[alias]: self._control_ids[name] for name, alias in self._aliases.items()}
        return core, new_ids[self._boundary], control_ids


def _whole_encoding(marked: MarkedText, encoding: Encoding, prompt_ids: list[int]) -> EncodedText | None:
    """The stretches in tokens; None where a token crosses the start of an answer."""
    token_ids = encoding.ids
    if token_ids[: len(prompt_ids)] != prompt_ids:
        return None
    last_start, last_end = marked.answers[-1]
    if len(marked.answers) == 1 and last_end == len(marked.text):  # nearly every row: no offsets needed
        return EncodedText(token_ids=token_ids, answers=((len(prompt_ids), len(token_ids)),))
    offsets = encoding.offsets
    ends = [end for _, end in offsets]
    answers = []
    for start, end in marked.answers:
        first = len(prompt_ids) if start == last_start else bisect_right(ends, start)
        after = bisect_right(ends, end)
        if first >= after:
            return None
        if offsets[first][0] < start or (after < len(offsets) and offsets[after][0] < end):
            return None
        answers.append((first, after))
    return EncodedText(token_ids=token_ids, answers=tuple(answers))
