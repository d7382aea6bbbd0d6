"""What the documentation shows: its pages, their code blocks, and the commands in both."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
_INDENTED = re.compile(r"(?<=\n\n)((?:    .*\n)+)")
_PROMPTED = re.compile(r"^(?:\$ )?((?:alto|make|python|sh) .*)$", re.MULTILINE)
_SPOKEN = re.compile(r"(?:alto|make|python|sh|pip|prefect|docker) .+")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """One that a page shows."""

    page: str
    words: tuple[str, ...]
    """Without a comment and without the variables before it."""
    variables: tuple[tuple[str, str], ...]
    """Set for this command alone or, by `export`, for those after it too."""
    is_spoken: bool
    """It stands in a sentence, where arguments that say nothing are left out."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def blocks() -> Iterator[Block]:
    """Of all pages."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for _, language, content in FENCE.findall(text):
            yield Block(page.name, language, content)
        for content in _INDENTED.findall(FENCE.sub("", text)):
            yield Block(page.name, "", "".join(line[4:] + "\n" for line in content.splitlines()))


def commands_of(block: Block) -> Iterator[Command]:
    """All lines of a block for a shell; of one without a language, those that begin with a program that pages call."""
    text = block.text.replace("\\\n", " ")
    if block.language not in ("sh", ""):
        return
    for line in text.splitlines() if block.language == "sh" else _PROMPTED.findall(text):
        if words := shlex.split(line, comments=True):
            yield _command(block.page, words, is_spoken=False)


def commands() -> Iterator[Command]:
    """Of all pages, those in sentences too."""
    for block in blocks():
        yield from commands_of(block)
    for page in PAGES:
        for span in CODE_SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            if _SPOKEN.fullmatch(span):
                yield _command(page.name, shlex.split(span), is_spoken=True)


def _command(page: str, words: list[str], *, is_spoken: bool) -> Command:
    if words[0] == "export":
        words = [*words[1:], "export"]
    count = next(i for i, word in enumerate(words) if not re.match(r"\w+=", word))
    variables = tuple((name, value) for name, _, value in (word.partition("=") for word in words[:count]))
    return Command(page, tuple(words[count:]), variables, is_spoken)
