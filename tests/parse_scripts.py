"""Says of command lines of Python scripts whether the scripts take them; test_commands.py runs it in a process.

Reads a JSON list of lists of words from standard input and prints as many refusals, null where there is none. A script
runs up to the place where it has read its words.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

_PARSE = argparse.ArgumentParser.parse_args


class _Parsed(BaseException):
    pass


def _stop_when_parsed(parser: argparse.ArgumentParser, *words: Any, **options: Any) -> None:
    _PARSE(parser, *words, **options)
    raise _Parsed


def refusal(script: str, *words: str) -> str | None:
    if not Path(script).is_file():
        return "no such file"
    text = Path(script).read_text(encoding="utf-8")
    if "ArgumentParser" not in text:  # one that looks at `sys.argv` by itself has no parser to ask
        looks = "sys.argv[" in text or "sys.argv)" in text
        return f"it takes no words, got {words}" if words and not looks else None
    sys.argv = [script, *words]
    sys.path[0] = str(Path(script).parent)
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            runpy.run_path(script, run_name="__main__")
    except _Parsed:
        return None
    except SystemExit:
        return told.getvalue()
    return "it ended without reading its words"


if __name__ == "__main__":
    argparse.ArgumentParser.parse_args = _stop_when_parsed  # type: ignore[assignment]
    print(json.dumps([refusal(*words) for words in json.load(sys.stdin)]))
