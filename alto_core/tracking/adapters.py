"""Adapters as artifacts of their jobs' runs. Registered versions of them are in `registry`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from alto_core.errors import TrackingError
from alto_core.tracking.connection import Connection

ARTIFACT_FOLDER = "adapter"
REQUIRED_FILES = ("adapter_config.json", "adapter_model.safetensors")


def upload_adapter(connection: Connection, run_id: str, folder: Path) -> None:
    """Upload an adapter folder to a run, and compare what arrived with what was sent, file by file.

    Raises:
        UnreachableError: MLflow is away.
        TrackingError: the folder is no PEFT adapter, or MLflow did not take it whole.
    """
    files = adapter_files(folder)
    client = connection.client
    connection.attempt("upload an adapter", client.log_artifacts, run_id, str(folder), ARTIFACT_FOLDER)
    arrived = {
        item.path: item.file_size
        for item in connection.attempt("list an adapter", client.list_artifacts, run_id, ARTIFACT_FOLDER)
    }
    for name, file in files.items():
        size = arrived.get(f"{ARTIFACT_FOLDER}/{name}")
        if size != file.stat().st_size:
            raise TrackingError(
                f"upload of {file}: got {size} bytes in MLflow, expected {file.stat().st_size}. Resume the task."
            )


def adapter_uri(run_id: str) -> str:
    """Where MLflow keeps the adapter of a run."""
    return f"runs:/{run_id}/{ARTIFACT_FOLDER}"


def adapter_files(folder: Path) -> dict[str, Path]:
    """The files of an exported adapter by name.

    Raises:
        TrackingError: the folder is no PEFT adapter, or holds a symbolic link, which would bring in another file.
    """
    files = {file.name: file for file in sorted(folder.iterdir())} if folder.is_dir() else {}
    if link := next((file for file in files.values() if file.is_symlink()), None):
        raise TrackingError(
            f"adapter {folder}: got the symbolic link {link.name}, expected files. Copy its target here."
        )
    missing = [name for name in REQUIRED_FILES if name not in files]
    if missing:
        raise TrackingError(f"adapter {folder}: got no {' and no '.join(missing)}, expected an exported PEFT adapter")
    return files


def adapter_digest(files: Mapping[str, Path]) -> str:
    """SHA-256 over configuration and weights."""
    digest = hashlib.sha256()
    for name in REQUIRED_FILES:
        digest.update(files[name].read_bytes())
    return digest.hexdigest()
