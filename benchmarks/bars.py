"""The table of measured figures, benchmarks/results/bars.csv: one row per bar, replaced when it is measured again."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results" / "bars.csv"
COLUMNS = ("bar", "value", "target", "unit", "gpu", "versions", "commit", "date", "command")


def record_bar(
    bar: str,
    value: float,
    *,
    target: str,
    unit: str = "",
    packages: Sequence[str] = ("torch", "transformers", "peft"),
    command: str | None = None,
    gpu: str | None = None,
    versions: str | None = None,
    file: Path = RESULTS,
) -> None:
    """Write one figure, in place of an earlier one of the same name.

    Args:
        bar: id of the figure, for example `main.quickstart_seconds`.
        value: what was measured.
        target: the bound it is held against, for example `<= 600`.
        unit: of value and target.
        packages: whose versions belong beside the figure.
        command: what to type to measure it again; this program's own command line when None.
        gpu, versions: of the machine that measured, when it is another one than this.
        file: the table.
    """
    rows = {}
    if file.exists():
        with file.open(newline="", encoding="utf-8") as source:
            rows = {row["bar"]: row for row in csv.DictReader(source)}
    rows[bar] = {
        "bar": bar,
        "value": f"{value:.6g}",
        "target": target,
        "unit": unit,
        "gpu": gpu or _gpu(),
        "versions": versions or _versions(packages),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command or shlex.join(["python", *sys.argv]),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def _gpu() -> str:
    import torch  # only when a figure is written: the table itself needs no torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _versions(packages: Sequence[str]) -> str:
    versions = [f"python {sys.version_info.major}.{sys.version_info.minor}"]
    return "; ".join(versions + [f"{package} {importlib.metadata.version(package)}" for package in packages])


def _commit() -> str:
    """Short hash of the checkout, with `+` when files were changed since; `none` outside of git or before a commit."""
    here = Path(__file__).resolve().parent
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    )
    if head.returncode:
        return "none"
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
