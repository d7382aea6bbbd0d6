"""prefect.yaml: what it names exists, and a worker finds it without a checkout."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint

FILE = Path(__file__).resolve().parents[2] / "prefect.yaml"


def deployments() -> list[dict]:  # type: ignore[type-arg]
    return list(yaml.safe_load(FILE.read_text())["deployments"])


@pytest.mark.parametrize("deployment", deployments(), ids=lambda d: d["name"])
def test_entrypoints_are_modules_and_parameters_fit(
    deployment: dict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,  # type: ignore[type-arg]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "/" not in deployment["entrypoint"]
    flow = load_flow_from_entrypoint(deployment["entrypoint"], use_placeholder_flow=False)
    assert isinstance(flow, Flow)
    assert set(deployment["parameters"]) <= set(inspect.signature(flow.fn).parameters)


def test_no_deployment_names_a_path_of_one_machine() -> None:
    text = FILE.read_text()
    assert "/home" not in text
    assert "set_working_directory" not in text
