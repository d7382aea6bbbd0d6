"""Addresses of MLflow's own pages."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Sequence

from alto_core.settings import Settings

EMBEDDED_UI = "http://127.0.0.1:5000"
"""Where `alto ui` shows the embedded MLflow unless told otherwise."""
MAX_COMPARED_RUNS = 20
"""On one page; more make it slow and unreadable."""
_SIDE = "workflowType=machine_learning"
"""MLflow's pages have a side for training and one for prompts and traces, which they show unless told."""


def ui_url(settings: Settings) -> str:
    """Of the MLflow server, or of `alto ui` for the embedded one."""
    uri = settings.mlflow_tracking_uri
    return uri.rstrip("/") if uri.startswith(("http://", "https://")) else EMBEDDED_UI


def run_url(base: str, experiment_id: str, run_id: str) -> str:
    return f"{_run_page(base, experiment_id, run_id)}?{_SIDE}"


def artifact_url(base: str, experiment_id: str, run_id: str, name: str) -> str:
    return f"{_run_page(base, experiment_id, run_id)}/artifacts/{urllib.parse.quote(name)}?{_SIDE}"


def model_url(base: str, name: str) -> str:
    """The registered model with its versions and aliases."""
    return f"{base}/#/models/{urllib.parse.quote(name)}?{_SIDE}"


def compare_url(base: str, experiment_id: str, run_ids: Sequence[str]) -> str:
    """The page that compares runs, parallel coordinates included; of many, the first `MAX_COMPARED_RUNS`."""
    runs = urllib.parse.quote(json.dumps(list(run_ids)[:MAX_COMPARED_RUNS], separators=(",", ":")))
    experiments = urllib.parse.quote(json.dumps([experiment_id], separators=(",", ":")))
    return f"{base}/#/compare-runs?runs={runs}&experiments={experiments}&{_SIDE}"


def _run_page(base: str, experiment_id: str, run_id: str) -> str:
    return f"{base}/#/experiments/{experiment_id}/runs/{run_id}"
