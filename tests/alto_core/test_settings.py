"""Settings from the environment: what each variable does, and values that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from alto_core.errors import TaskFileError
from alto_core.settings import load_settings


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
