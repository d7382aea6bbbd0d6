"""Feeds damaged and strange input to ALTO: no traceback may reach a user, and nothing may hang.

    python benchmarks/fuzz.py                  # 12,000 cases; writes the row faults.fuzz_cases
    python benchmarks/fuzz.py --cases 200 --seed 7 --only "data rows" --no-bars

What may come out of a case is a result, or an `AltoError` that names the file, row or field. The first fault of a kind
is reduced to a small case and shown, and the script fails.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
from bars import record_bar
from fuzz_files import DataFiles, TaskFiles
from fuzz_input import Kind
from fuzz_states import Checkpoints, Curves
from tiny_inputs import write_tiny_model

from alto_core.errors import AltoError

SHARES = {"task files": 0.4, "data rows": 0.25, "checkpoints": 0.15, "curves": 0.2}
HANG_SECONDS = 30


@dataclass
class Tally:
    """What became of the cases of one kind."""

    cases: int = 0
    refused: int = 0
    """Ended as an `AltoError`."""
    slowest: float = 0.0
    """Seconds."""
    slowest_case: str = ""


def run_kind(kind: Kind, cases: int, *, seed: int | None = None, guard: Callable[[], Any] | None = None) -> Tally:
    """Run so many cases of a kind.

    Args:
        kind: what to draw and run.
        cases: how many.
        seed: draws other cases; None: always the same ones.
        guard: called before each case and with its end, for a watch on hangs.

    Raises:
        Exception: the fault that a case brought about, after hypothesis has reduced the case.
    """
    tally = Tally()

    @hypothesis.settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(kind.strategy())
    def one(case: Any) -> None:
        start = time.perf_counter()
        try:
            if guard is not None:
                guard()
            kind.run(case)
        except AltoError:
            tally.refused += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0) if guard is not None else None
        tally.cases += 1
        seconds = time.perf_counter() - start
        if seconds > tally.slowest:
            tally.slowest, tally.slowest_case = seconds, repr(case)[:300]

    (one if seed is None else hypothesis.seed(seed)(one))()
    return tally


def write_chat_model(folder: Path) -> Path:
    """The tests' tiny model, with a chat template."""
    (write_tiny_model(folder) / "chat_template.jinja").write_text(
        "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}",
        encoding="utf-8",
    )
    return folder


def kinds(folder: Path, model: Path) -> dict[str, Callable[[], Kind]]:
    """How each kind is made, by its name."""
    for name in ("task", "data", "state", "curves"):
        (folder / name).mkdir()
    return {
        TaskFiles.name: lambda: TaskFiles(folder / "task"),
        DataFiles.name: lambda: DataFiles(folder / "data", model),
        Checkpoints.name: lambda: Checkpoints(folder / "state", model),
        Curves.name: lambda: Curves(folder / "curves"),
    }


def _watch() -> None:
    def hang(*_: object) -> None:
        raise RuntimeError(f"no end after {HANG_SECONDS} s")

    signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(SHARES))
    parser.add_argument("--no-bars", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # a damaged checkpoint is told as a warning, thousands of times
    total, faults = 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, make in kinds(folder, write_chat_model(folder / "model")).items():
            if arguments.only not in (None, name):
                continue
            start, kind = time.perf_counter(), make()
            wanted = round(arguments.cases * (1.0 if arguments.only else SHARES[name]))
            try:
                tally = run_kind(kind, wanted, seed=arguments.seed, guard=_watch)
            except Exception:
                faults += 1
                print(f"{name}: FAULT")
                traceback.print_exc()
                continue
            finally:
                kind.close()
            total += tally.cases
            print(
                f"{name}: {tally.cases} cases, {tally.refused} refused, none with a fault; the slowest took "
                f"{tally.slowest:.1f} s, all {time.perf_counter() - start:.0f} s ({tally.slowest_case})",
                flush=True,
            )
    if not faults and not arguments.no_bars:
        record_bar("faults.fuzz_cases", total, target=">= 10000", packages=("hypothesis", "torch", "pyarrow"))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
