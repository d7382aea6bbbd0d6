"""Whether ALTO would work on this machine: a list of checks, each with what was found and the command that mends it.

Looks and reports; changes nothing but a probe file that it removes again, and gives an empty store on a database server
its tables. Printing is `flows.cli.doctor`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sqlite3
import sys
import tempfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.requirements import Requirement

from alto_core import wording
from alto_core.errors import AltoError
from alto_core.redaction import without_secrets
from alto_core.settings import Settings

DISTRIBUTION = "alto-lora"
NEEDED = (
    "torch",
    "transformers",
    "safetensors",
    "datasets",
    "mlflow",
    "prefect",
    "sqlmodel",
    "pandas",
    "pydantic",
    "typer",
    "rich",
)
"""Looked for when ALTO runs from a folder that was never installed and so declares nothing."""
PYTHON_RANGE = ((3, 11), (3, 14))
LOW_DISK_BYTES = 5 * 2**30
"""A 135M-parameter task writes about 1 GiB; below this a larger one will not end well."""


class Health(StrEnum):
    """What a check means for a tune on this machine."""

    OK = "ok"
    NOTE = "note"
    """Works, but worth knowing."""
    BROKEN = "broken"
    """A tune would fail."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    health: Health
    found: str
    remedy: str = ""
    """What to do, a command where there is one."""


def examine(settings: Settings) -> tuple[Check, ...]:
    """Run every check. None of them raises for what it finds; a broken machine is a result."""
    checks = [_python(), *_packages()]
    checks += _devices(settings)
    checks += [_home(settings), _disk(settings), _store(settings), _mlflow(settings), _prefect(settings)]
    return tuple(checks)


def can_tune(checks: tuple[Check, ...]) -> bool:
    return all(check.health is not Health.BROKEN for check in checks)


def _python() -> Check:
    low, high = PYTHON_RANGE
    good = low <= sys.version_info[:2] < high
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    remedy = "" if good else f"Use Python {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}."
    return Check(name="Python", health=Health.OK if good else Health.NOTE, found=found, remedy=remedy)


def _packages() -> list[Check]:
    """Every declared dependency with its version; those that are missing or outside the declared range stand apart."""
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
        head = Check(name="ALTO", health=Health.OK, found=wording.alto_version())
    except importlib.metadata.PackageNotFoundError:
        declared = [Requirement(name) for name in NEEDED]
        head = Check(
            name="ALTO", health=Health.NOTE, found="runs from a folder, not installed", remedy="pip install -e ."
        )
    good, checks = [], [head]
    for requirement in declared:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(_wrong_package(requirement, "missing", Health.BROKEN))
            continue
        if requirement.specifier.contains(version, prereleases=True):
            good.append(f"{requirement.name} {version}")
        else:
            checks.append(_wrong_package(requirement, f"{version}, expected {requirement.specifier}", Health.NOTE))
    checks.insert(1, Check(name="packages", health=Health.OK, found=", ".join(good)))
    return checks


def _wrong_package(requirement: Requirement, found: str, health: Health) -> Check:
    wanted = f"{requirement.name}{requirement.specifier}"
    return Check(name=requirement.name, health=health, found=found, remedy=f"pip install '{wanted}'")


def _devices(settings: Settings) -> list[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [
            Check(
                name="devices",
                health=Health.BROKEN,
                found=f"torch cannot be loaded: {error}",
                remedy="pip install torch",
            )
        ]
    import psutil

    memory = psutil.virtual_memory()
    free, total = wording.size(memory.available), wording.size(memory.total)
    cpu = f"{torch.get_num_threads()} threads, {free} of {total} memory free"
    checks = [Check(name="CPU", health=Health.OK, found=cpu), _gpus(settings)]
    return [*checks, _lora_path(settings)]


def _gpus(settings: Settings) -> Check:
    import torch

    wanted = settings.device or ""
    if not torch.cuda.is_available():
        if wanted.startswith("cuda"):
            found = f"none, but ALTO_DEVICE is {wanted}"
            return Check(name="GPU", health=Health.BROKEN, found=found, remedy="unset ALTO_DEVICE, or mend the driver")
        return Check(name="GPU", health=Health.OK, found="none; training runs on the CPU")
    parts = []
    for index in range(torch.cuda.device_count()):
        free, total = map(wording.size, torch.cuda.mem_get_info(index))
        parts.append(f"cuda:{index} {torch.cuda.get_device_name(index)}, {free} of {total} free")
    return Check(name="GPU", health=Health.OK, found="; ".join(parts))


def _lora_path(settings: Settings) -> Check:
    import torch

    from kernels.path_choice import kernel_path

    on_gpu = torch.cuda.is_available() and settings.device != "cpu"
    device = torch.device("cuda" if on_gpu else "cpu")
    why = "ALTO_DEVICE says so" if settings.device else "there is a GPU" if on_gpu else "there is no GPU"
    return Check(name="LoRA path", health=Health.OK, found=f"{kernel_path(device)}, since {why}")


def _home(settings: Settings) -> Check:
    folder = _nearest_folder(settings.home)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".alto-doctor-"):
            pass
    except OSError as error:
        found = f"{settings.home} cannot be written: {error.strerror}"
        return Check(name="ALTO_HOME", health=Health.BROKEN, found=found, remedy="export ALTO_HOME=<a folder of yours>")
    made = "" if settings.home.exists() else ", made by the first task"
    return Check(name="ALTO_HOME", health=Health.OK, found=f"{settings.home}{made}")


def _disk(settings: Settings) -> Check:
    free = shutil.disk_usage(_nearest_folder(settings.home)).free
    low = free < LOW_DISK_BYTES
    return Check(
        name="free disk",
        health=Health.NOTE if low else Health.OK,
        found=wording.size(free),
        remedy="Free some, or set ALTO_HOME to a larger disk." if low else "",
    )


def _store(settings: Settings) -> Check:
    file = Path(settings.store_url.removeprefix("sqlite:///")) if settings.store_address is None else None
    if file is not None and not file.exists():
        return Check(name="store", health=Health.OK, found="empty, made by the first task")
    try:
        from alto_core.store import Store

        tasks = Store(settings).tasks()
    except (AltoError, ImportError) as error:
        remedy = "Start that database, or unset ALTO_STORE_URL." if file is None else f"mv {file} {file}.old"
        return Check(name="store", health=Health.BROKEN, found=str(error), remedy=remedy)
    place = file or without_secrets(settings.store_url)
    return Check(name="store", health=Health.OK, found=f"{place}, {wording.plural(len(tasks), 'task')}")


def _mlflow(settings: Settings) -> Check:
    uri = settings.mlflow_tracking_uri
    if uri.startswith("sqlite:///"):
        return _database("MLflow", Path(uri.removeprefix("sqlite:///")))
    return _server("MLflow", uri, "/health", "MLFLOW_TRACKING_URI")


def _prefect(settings: Settings) -> Check:
    if settings.prefect_api_url is not None:
        return _server("Prefect", settings.prefect_api_url, "/health", "PREFECT_API_URL")
    home = Path(os.environ.get("PREFECT_HOME") or settings.home / "prefect")
    return _database("Prefect", home / "prefect.db")


def _database(name: str, file: Path) -> Check:
    """An embedded database is fine when it is not there yet, or is a whole SQLite file."""
    if not file.exists():
        return Check(name=name, health=Health.OK, found="embedded, made by the first task")
    try:
        with contextlib.closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            connection.execute("select count(*) from sqlite_master").fetchone()
    except sqlite3.Error as error:
        return Check(name=name, health=Health.BROKEN, found=f"{file}: {error}", remedy=f"mv {file} {file}.old")
    return Check(name=name, health=Health.OK, found=f"embedded, {file}, {wording.size(file.stat().st_size)}")


def _server(name: str, url: str, health_path: str, variable: str) -> Check:
    shown = without_secrets(url)
    try:
        with urllib.request.urlopen(url.rstrip("/") + health_path, timeout=5) as response:  # noqa: S310 - from the settings
            good = response.status == 200
            found = f"{shown} answers" if good else f"{shown} answers {response.status}"
    except urllib.error.HTTPError as error:
        good, found = False, f"{shown} answers {error.code}"
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        good, found = False, f"{shown} does not answer: {without_secrets(str(reason))}"
    remedy = "" if good else f"Start that server, or unset {variable} to use an embedded database."
    return Check(name=name, health=Health.OK if good else Health.BROKEN, found=found, remedy=remedy)


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or the nearest one above that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
