"""One process at a time works on a task, and a dead one holds nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alto_core.errors import StoreError
from alto_core.task_lock import held, times_held

HOLDER = """
import sys, time
from pathlib import Path
from alto_core.task_lock import held
with held("tiny-1", Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_living_holder_is_named_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    """P1: no record of a state decides whether a task still runs, its process does."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        refusal = rf"task tiny-1: process {process.pid} on .* is at work on it"
        with pytest.raises(StoreError, match=refusal), held("tiny-1", tmp_path):
            pass
        os.kill(process.pid, signal.SIGKILL)
    with held("tiny-1", tmp_path, patience_seconds=10):
        assert times_held(tmp_path) == 2


def test_what_a_damaged_note_says_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / ".at-work.json").write_text("{")
    with held("tiny-1", tmp_path):
        assert times_held(tmp_path) == 1
