"""What is imported costs no collection, then or at the end of the process; the collector is back afterwards."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from alto_core.loading import loading


def test_nothing_is_collected_inside_and_the_collector_is_back_afterwards() -> None:
    with pytest.raises(ImportError), loading():
        with loading():
            assert not gc.isenabled()
        assert not gc.isenabled(), "a block inside another leaves it off"
        raise ImportError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_ends_without_looking_through_what_it_loaded() -> None:
    program = "import atexit, gc, sys; from flows.cli.app import main; sys.argv = ['alto', '--version']; "
    program += "atexit.register(lambda: print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 1_000)); main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"
