"""Addresses of MLflow's pages."""

from __future__ import annotations

import urllib.parse
from pathlib import Path

from alto_core.settings import load_settings
from alto_core.tracking.links import artifact_url, compare_url, model_url, run_url, ui_url


def test_a_server_is_linked_without_its_password_and_the_embedded_one_where_alto_ui_shows_it(tmp_path: Path) -> None:
    home = {"ALTO_HOME": str(tmp_path)}
    assert ui_url(load_settings(home)) == "http://127.0.0.1:5000"
    server = load_settings({**home, "MLFLOW_TRACKING_URI": "https://me:secret@mlflow.example/"})
    assert ui_url(server) == "https://mlflow.example"


def test_pages_of_runs_artifacts_and_models() -> None:
    base, side = "http://127.0.0.1:5000", "workflowType=machine_learning"
    assert run_url(base, "7", "a1") == f"{base}/#/experiments/7/runs/a1?{side}"
    report = artifact_url(base, "7", "a1", "report.html")
    assert report == f"{base}/#/experiments/7/runs/a1/artifacts/report.html?{side}"
    assert model_url(base, "my replies") == f"{base}/#/models/my%20replies?{side}"
    address = urllib.parse.unquote(compare_url(base, "7", ["a", "b"]))
    assert address == f'{base}/#/compare-runs?runs=["a","b"]&experiments=["7"]&{side}'
