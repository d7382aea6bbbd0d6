"""Settings from the environment: what each variable does, and values that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from alto_core.errors import TaskFileError
from alto_core.settings import TELEMETRY_OFF, load_settings, prepare_environment


def test_defaults_lie_under_one_folder(tmp_path: Path) -> None:
    settings = load_settings({"ALTO_HOME": str(tmp_path)})
    assert settings.mlflow_tracking_uri == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert (settings.device, settings.prefect_api_url, settings.cuda_graph) == (None, None, True)


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True), ("", True)])
def test_cuda_graph_is_a_switch(value: str, expected: bool) -> None:
    assert load_settings({"ALTO_CUDA_GRAPH": value}).cuda_graph is expected


def test_another_value_is_refused_by_name() -> None:
    with pytest.raises(TaskFileError, match="ALTO_CUDA_GRAPH: got maybe, expected 0 or 1"):
        load_settings({"ALTO_CUDA_GRAPH": "maybe"})


def test_telemetry_is_off_unless_someone_has_said_otherwise(tmp_path: Path) -> None:
    settings = load_settings({"ALTO_HOME": str(tmp_path)})
    silent: dict[str, str] = {}
    prepare_environment(settings, silent)
    assert silent.items() >= TELEMETRY_OFF.items()
    assert {"DO_NOT_TRACK", "MLFLOW_DISABLE_TELEMETRY", "HF_HUB_DISABLE_TELEMETRY"} <= TELEMETRY_OFF.keys()
    wished = dict.fromkeys(TELEMETRY_OFF, "as I said")
    prepare_environment(settings, wished)
    assert {name: wished[name] for name in TELEMETRY_OFF} == dict.fromkeys(TELEMETRY_OFF, "as I said")


def test_a_login_in_an_address_moves_to_its_own_variables(tmp_path: Path) -> None:
    environ = {
        "ALTO_HOME": str(tmp_path),
        "MLFLOW_TRACKING_URI": "https://alice:p%40ss@mlflow:5000/base",
        "PREFECT_API_URL": "http://alto:word@prefect/api",
    }
    prepare_environment(load_settings(environ), environ)
    settings = load_settings(environ)
    assert (settings.mlflow_tracking_uri, settings.prefect_api_url) == (
        "https://mlflow:5000/base",
        "http://prefect/api",
    )
    assert (environ["MLFLOW_TRACKING_USERNAME"], environ["MLFLOW_TRACKING_PASSWORD"]) == ("alice", "p@ss")
    assert environ["PREFECT_API_AUTH_STRING"] == "alto:word"
    assert not settings.logins


def test_the_end_of_a_task_waits_as_long_as_it_is_told_to() -> None:
    assert load_settings({}).tracking_wait_seconds == 300
    assert load_settings({"ALTO_TRACKING_WAIT_SECONDS": "0"}).tracking_wait_seconds == 0


@pytest.mark.parametrize("name", ["ALTO_TRACKING_WAIT_SECONDS", "ALTO_LEASE_SECONDS"])
@pytest.mark.parametrize("value", ["-1", "soon", "86400", "nan"])
def test_a_wait_that_is_none_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(TaskFileError, match=f"{name}: got {value}, expected . to 3600 seconds"):
        load_settings({name: value})
