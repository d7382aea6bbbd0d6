"""Makes a version of a registered model from an adapter folder. Aliases and what a version means are `registry`'s."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from alto_core.errors import TrackingError
from alto_core.tracking.connection import Connection
from alto_core.tracking.description import OWNER, as_tags
from alto_core.tracking.identity import let_manage
from alto_core.tracking.packaging import ServingFacts, packaged


def create_version(
    connection: Connection,
    *,
    name: str,
    experiment_id: str,
    run_id: str,
    folder: Path,
    tags: Mapping[str, str],
    facts: ServingFacts,
) -> ModelVersion:
    """Through a logged model, so that MLflow links the version to its run; a half-made one is marked as failed.

    Raises:
        TrackingError: MLflow did not take it.
    """
    client, call = connection.client, connection.call
    model = call(
        "create a logged model",
        client.create_logged_model,
        experiment_id,
        name=_logged_name(name),
        source_run_id=run_id,
        model_type="lora",
    )
    try:
        with packaged(folder, facts) as package:
            call("upload an adapter", client.log_model_artifacts, model.model_id, str(package))
        call("finish a logged model", client.finalize_logged_model, model.model_id, "READY")
    except TrackingError:
        client.finalize_logged_model(model.model_id, "FAILED")
        raise
    _create_registered_model(connection, name, tags.get(OWNER))
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


def remove_leftovers(connection: Connection, *, name: str, experiment_id: str, run_id: str) -> None:
    """Remove logged models of a run that has no version yet: their maker was killed before it came to that.

    Raises:
        TrackingError: MLflow refused.
    """
    client, call = connection.client, connection.call
    wanted = f"name = '{_logged_name(name)}'"
    for model in call("find logged models", client.search_logged_models, [experiment_id], wanted):
        if model.source_run_id == run_id:
            call("remove a half-made logged model", client.delete_logged_model, model.model_id)


def _logged_name(name: str) -> str:
    """MLflow takes a dot in the name of a registered model, and refuses it in that of a logged one."""
    return name.replace(".", "-")


def _create_registered_model(connection: Connection, name: str, owner: str | None) -> None:
    try:
        connection.client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise TrackingError(f"registered model {name!r}: MLflow refused to create it ({error})") from error
        return
    if connection.person.is_admin and owner not in (None, connection.person.name):
        let_manage(connection.uri, connection.call, owner, name)
