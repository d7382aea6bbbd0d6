"""Who is logged in to MLflow, and letting an owner manage what a host of the cluster made for them."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import requests
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from alto_core.errors import TrackingError
from alto_core.ownership import Person

Call = Callable[..., Any]
"""`Connection.call`."""

LOGIN_HINT = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
CURRENT_USER = "/api/2.0/mlflow/users/current"
GRANT = "/api/3.0/mlflow/users/permissions/grant"


def person_of(uri: str, call: Call) -> Person:
    """The user of a server's basic-auth app; nobody where it has none.

    Raises:
        TrackingError: MLflow cannot be reached, or asks for a login.
    """
    response = call("ask who is logged in", _request, uri, CURRENT_USER, "GET")
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        raise TrackingError(f"MLflow at {uri} asks who you are. {LOGIN_HINT}.")
    try:
        user = response.json()["user"]
        return Person(name=str(user["username"]), is_admin=bool(user["is_admin"]))
    except (ValueError, KeyError, TypeError):  # no such page: 404, or the start page of the UI
        return Person()


def let_manage(uri: str, call: Call, owner: str, registered_model: str) -> None:
    """Give an owner the rights on a registered model that an admin's host has just made for their task.

    An owner that MLflow does not know, as an admin may write into a task file, gets none.

    Raises:
        TrackingError: MLflow refused.
    """
    grant = {
        "username": owner,
        "resource_type": "registered_model",
        "resource_id": registered_model,
        "permission": "MANAGE",
    }
    response = call("let the owner manage a registered model", _request, uri, GRANT, "POST", grant)
    if response.status_code != HTTPStatus.NOT_FOUND:
        call("let the owner manage a registered model", response.raise_for_status)


def _request(uri: str, path: str, method: str, content: dict[str, str] | None = None) -> requests.Response:
    body = {} if content is None else {"json": content}
    return http_request(get_default_host_creds(uri), path, method, **body)
