"""Adapters in MLflow: as artifacts of a job's run, and as versions of a registered model.

Only the adapter is stored; the base model stays a name in `adapter_config.json`. Comparing a challenger with the
champion and moving aliases is the promotion's job.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from alto_core.config import NAME_PATTERN
from alto_core.errors import TrackingError
from alto_core.tracking.connection import Connection, is_passing
from alto_core.tracking.description import as_tags

CHAMPION = "champion"
CHALLENGER = "challenger"
ARTIFACT_FOLDER = "adapter"
REQUIRED_FILES = ("adapter_config.json", "adapter_model.safetensors")
DIGEST_TAG = "alto.adapter_sha256"


@dataclass(frozen=True, kw_only=True)
class RegisteredAdapter:
    """One version of a registered model."""

    name: str
    version: int
    aliases: tuple[str, ...]
    run_id: str
    """MLflow run of the job that trained it."""
    tags: Mapping[str, str]

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


def log_adapter(connection: Connection, run_id: str, folder: Path) -> str:
    """Upload an adapter folder to a run, and compare what arrived with what was sent, file by file.

    Raises:
        TrackingError: the folder is no PEFT adapter, or MLflow did not take it whole.
    """
    files = _adapter_files(folder)
    client = connection.client
    connection.call("upload an adapter", client.log_artifacts, run_id, str(folder), ARTIFACT_FOLDER)
    arrived = {
        item.path: item.file_size
        for item in connection.call("list an adapter", client.list_artifacts, run_id, ARTIFACT_FOLDER)
    }
    for name, file in files.items():
        size = arrived.get(f"{ARTIFACT_FOLDER}/{name}")
        if size != file.stat().st_size:
            raise TrackingError(
                f"upload of {file}: got {size} bytes in MLflow, expected {file.stat().st_size}. Resume the task."
            )
    return f"runs:/{run_id}/{ARTIFACT_FOLDER}"


def register(
    connection: Connection,
    *,
    name: str,
    experiment_id: str,
    run_id: str,
    folder: Path,
    tags: Mapping[str, str],
    input_example: str | None,
) -> RegisteredAdapter:
    """Make a model version of an adapter folder: the model's first version becomes champion, a later one challenger.

    Called again with the same run and the same weights, returns the version that is there.

    Args:
        name: registered model; created where there is none.
        experiment_id: experiment of the task.
        run_id: run of the job that trained the adapter.
        folder: the exported PEFT adapter.
        tags: what links the version to its task, job, data digest and scores.
        input_example: a prompt that the adapter was trained for.

    Raises:
        TrackingError: the name or the folder is unfit, or MLflow did not take it.
    """
    if not re.fullmatch(NAME_PATTERN, name):
        raise TrackingError(
            f"registered model {name!r}: expected 1 to 64 letters, digits, '.', '_' or '-'. Set `registry_name`."
        )
    all_tags = {**tags, DIGEST_TAG: _digest(_adapter_files(folder))}
    with connection.exclusive():
        versions = _versions(connection, name)
        same = [v for v in versions if v.run_id == run_id and v.tags.get(DIGEST_TAG) == all_tags[DIGEST_TAG]]
        version = (
            same[0]
            if same
            else _create_version(connection, name, experiment_id, run_id, folder, all_tags, input_example)
        )
        is_first = all(int(v.version) >= int(version.version) for v in versions)
        alias = CHAMPION if is_first else CHALLENGER
        if alias not in _aliases(connection, name, version):
            connection.call("set an alias", connection.client.set_registered_model_alias, name, alias, version.version)
    registered = find_version(connection, name, alias)
    if registered.version != int(version.version):
        raise TrackingError(
            f"alias {alias!r} of {name}: got version {registered.version} back, expected {version.version}. "
            "Register it again."
        )
    return registered


def find_version(connection: Connection, name: str, alias: str) -> RegisteredAdapter:
    """The version that an alias stands on.

    Raises:
        TrackingError: there is no such model or alias, or the alias is a reserved word.
    """
    check_alias(alias)
    try:
        version = connection.client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if not is_passing(error):
            known = ", ".join(sorted({a for v in _versions(connection, name) for a in _aliases(connection, name, v)}))
            raise TrackingError(
                f"registered model {name!r}: got no version with alias {alias!r}, expected one of its aliases: "
                f"{known or 'it has none'}"
            ) from None
        version = connection.call("find a model version", connection.client.get_model_version_by_alias, name, alias)
    return RegisteredAdapter(
        name=name,
        version=int(version.version),
        aliases=tuple(sorted(_aliases(connection, name, version))),
        run_id=version.run_id or "",
        tags=dict(version.tags),
    )


def check_alias(alias: str) -> None:
    """Refuse aliases that MLflow reserves, and look-alikes of ours.

    Raises:
        TrackingError: the alias cannot be used.
    """
    lower = alias.lower()
    is_reserved = lower == "latest" or re.fullmatch(r"v?\d+", lower)
    is_look_alike = lower in (CHAMPION, CHALLENGER) and alias != lower
    if is_reserved or is_look_alike or not re.fullmatch(NAME_PATTERN, alias):
        raise TrackingError(
            f"alias {alias!r}: expected a name that is neither `latest` nor a version number, such as `{CHAMPION}` "
            "(lower case)"
        )


def _create_version(
    connection: Connection,
    name: str,
    experiment_id: str,
    run_id: str,
    folder: Path,
    tags: Mapping[str, str],
    input_example: str | None,
) -> ModelVersion:
    """Through a logged model, so that MLflow links the version to its run; a half-made one is marked as failed."""
    client, call = connection.client, connection.call
    model = call(
        "create a logged model",
        client.create_logged_model,
        experiment_id,
        name=name,
        source_run_id=run_id,
        model_type="lora",
    )
    try:
        call("upload an adapter", client.log_model_artifacts, model.model_id, str(folder))
        if input_example is not None:
            with tempfile.TemporaryDirectory() as temporary:
                file = Path(temporary) / "input_example.txt"
                file.write_text(input_example, encoding="utf-8")
                call("upload an input example", client.log_model_artifact, model.model_id, str(file))
        call("finish a logged model", client.finalize_logged_model, model.model_id, "READY")
    except TrackingError:
        client.finalize_logged_model(model.model_id, "FAILED")
        raise
    if not _versions(connection, name):
        _create_registered_model(connection, name)
    return call(
        "create a model version",
        client.create_model_version,
        name,
        # not `models:/ID`: MLflow would look that up in whatever store its global settings name
        model.artifact_location,
        run_id,
        tags=as_tags(tags),
        model_id=model.model_id,
    )


def _create_registered_model(connection: Connection, name: str) -> None:
    try:
        connection.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise TrackingError(f"registered model {name!r}: MLflow refused to create it ({error})") from error


def _versions(connection: Connection, name: str) -> list[ModelVersion]:
    return list(connection.call("list model versions", connection.client.search_model_versions, f"name='{name}'"))


def _aliases(connection: Connection, name: str, version: ModelVersion) -> list[str]:
    """Read from the version itself: searches leave aliases out."""
    return list(
        connection.call("read a model version", connection.client.get_model_version, name, version.version).aliases
    )


def _adapter_files(folder: Path) -> dict[str, Path]:
    files = {file.name: file for file in sorted(folder.iterdir())} if folder.is_dir() else {}
    missing = [name for name in REQUIRED_FILES if name not in files]
    if missing:
        raise TrackingError(f"adapter {folder}: got no {' and no '.join(missing)}, expected an exported PEFT adapter")
    return files


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in REQUIRED_FILES:
        digest.update(files[name].read_bytes())
    return digest.hexdigest()
