"""Chats through the tokenizer's own template, and where in the rendered text each answer stands.

Every assistant turn starts where the chat before it, rendered with a generation prompt, ends; that must be a prefix of
the whole rendered chat, or the model would be trained on another text than it generates from. It ends with the first
control token behind the turn's own text (the stop token); what a template writes after that, mostly a newline, is not
trained. Templates with `{% generation %}` marks need no other treatment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from alto_core.data.formats import Chat, Turn
from alto_core.data.report import Reason, UnusableRowError, excerpt
from alto_core.data.text_encoder import MarkedText, TextEncoder
from alto_core.errors import first_line


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A chat as text, cut off behind its last answer."""

    marked: MarkedText
    stop_token: str | None
    """Control token that ends the last answer; None where the template writes none."""


def render_user_turn(tokenizer: Any) -> str:
    """A user's turn as the template writes it; empty where it refuses to write one alone."""
    try:
        return _render(tokenizer, [Turn(role="user", content="?")], generation=False)
    except UnusableRowError:
        return ""


def render_chat(tokenizer: Any, encoder: TextEncoder, chat: Chat) -> RenderedChat:
    """Render a chat and find its answers.

    Raises:
        UnusableRowError: the template refuses the chat, is not prefix-stable on it, or drops an answer.
    """
    turns = [Turn(role=turn.role, content=encoder.shield(turn.content)) for turn in chat.turns]
    text = _render(tokenizer, turns, generation=False)
    answered = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    starts = [_start_of_answer(tokenizer, turns[:i], text) for i in answered]
    # The last answer first: a template that writes no stop token there writes none elsewhere.
    end, stop_token = _end_of_answer(encoder, text, starts[-1], len(text), turns[-1].content, with_stop=True)
    answers = []
    for i, start in zip(answered[:-1], starts[:-1], strict=True):
        # As far as the chat up to this answer and the whole chat agree, no later turn's text can stand.
        own = num_shared(_render(tokenizer, turns[: i + 1], generation=False), text)
        with_stop = stop_token is not None
        answers.append((start, _end_of_answer(encoder, text, start, own, turns[i].content, with_stop=with_stop)[0]))
    answers.append((starts[-1], end))
    return RenderedChat(marked=MarkedText(text=text[:end], answers=tuple(answers)), stop_token=stop_token)


def num_shared(first: str, second: str) -> int:
    """Characters that two texts have in common at their start."""
    if second.startswith(first):
        return len(first)
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _start_of_answer(tokenizer: Any, before: Sequence[Turn], text: str) -> int:
    prompt = _render(tokenizer, before, generation=True)
    if not text.startswith(prompt):
        shared = num_shared(prompt, text)
        detail = f"turn {len(before) + 1}: the prompt goes on with {excerpt(prompt[shared:][:20])!r}"
        raise UnusableRowError(
            Reason.TEMPLATE_UNSTABLE, f"{detail}, the whole chat with {excerpt(text[shared:][:20])!r}"
        )
    return len(prompt)


def _end_of_answer(
    encoder: TextEncoder, text: str, start: int, own: int, content: str, *, with_stop: bool
) -> tuple[int, str | None]:
    """Where an answer ends, and the stop token it ends with; up to `own` all text is this or an earlier turn's."""
    answer = content.strip()
    marks = list(encoder.control_tokens(text, start)) if with_stop else []
    for found in marks:
        if found.end() <= own and text[start : found.start()].rstrip().endswith(answer):
            return found.end(), found[0]
    # Some templates drop a leading part (reasoning) or rewrite blanks.
    if marks and (rest := _without_blanks(text[start : marks[0].start()])):
        wanted = _without_blanks(answer)
        if wanted.endswith(rest) or (marks[0].end() <= own and rest.endswith(wanted)):
            return marks[0].end(), marks[0][0]
    inner = text[start:].lstrip()
    if inner.startswith(answer):
        return len(text) - len(inner) + len(answer), None
    raise UnusableRowError(Reason.TEMPLATE_REFUSED, "the template writes another text than the answer")


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _render(tokenizer: Any, turns: Sequence[Turn], *, generation: bool) -> str:
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        finding = first_line(error)
        raise UnusableRowError(Reason.TEMPLATE_REFUSED, excerpt(finding)) from None
    assert isinstance(rendered, str)
    return rendered
