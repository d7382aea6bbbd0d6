"""A PostgreSQL server of the tests' own, on a socket in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PORT = 54_329
"""Only names the socket; the server listens on no network."""


def _binaries() -> Path:
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists():
            return folder
    found = shutil.which("initdb")
    if found is None:
        pytest.skip("needs PostgreSQL (apt-get install postgresql)")
    return Path(found).resolve().parent


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yields a URL prefix to which a database name is added; skips where PostgreSQL or its driver is missing."""
    pytest.importorskip("psycopg", reason="needs the extra postgres (pip install alto-lora[postgres])")
    binaries = _binaries()
    user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    with tempfile.TemporaryDirectory(prefix="alto-postgres-") as name:
        folder = Path(name)
        if user:
            shutil.chown(folder, user)
        data, log = folder / "data", folder / "log"
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c port={PORT} -c fsync=off"
        start = [binaries / "pg_ctl", "-D", data, "-l", log, "-w", "-o", options, "start"]
        initialize = [binaries / "initdb", "-D", data, "-A", "trust", "-U", "alto", "--no-sync"]
        try:
            subprocess.run(initialize, user=user, cwd=folder, check=True, capture_output=True)
            subprocess.run(start, user=user, cwd=folder, check=True, capture_output=True)
            yield f"postgresql://alto@/%s?host={folder}&port={PORT}"
        finally:
            stop = [binaries / "pg_ctl", "-D", data, "-m", "immediate", "stop"]
            subprocess.run(stop, user=user, cwd=folder, check=False, capture_output=True)


def make_database(url_template: str, name: str) -> str:
    """A fresh database of this name; returns its URL."""
    import psycopg

    with psycopg.connect(url_template.replace("%s", "postgres"), autocommit=True) as connection:
        connection.execute(f'DROP DATABASE IF EXISTS "{name}"')  # type: ignore[arg-type]
        connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type]
    return url_template.replace("%s", name)
