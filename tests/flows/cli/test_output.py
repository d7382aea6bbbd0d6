"""What a command says beside its result."""

from __future__ import annotations

import io
import sys

import pytest

from flows.cli.output import busy


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "says"), [(_Terminal, True), (io.StringIO, False)], ids=["terminal", "pipe"])
def test_who_waits_at_a_terminal_is_told_for_what(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], says: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream())
    with busy("reading the rows"):
        pass
    written = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert ("reading the rows" in written) is says
    assert says or written == ""
