"""prefect.yaml: what it names exists, a worker finds it without a checkout, and `alto up` makes the same."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import yaml
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.flows import load_flow_from_entrypoint

from flows.deployments import (
    CONTROL_POOL,
    INTERVAL,
    QUEUE_EVENTS,
    RUN_EVENTS,
    RUN_VARIABLES,
    deploy_control,
    deploy_host,
)

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
    given = [trigger.get("parameters", {}) for trigger in deployment.get("triggers", [])]
    assert {name for parameters in given for name in parameters} <= set(inspect.signature(flow.fn).parameters)


def test_no_deployment_names_a_path_of_one_machine() -> None:
    text = FILE.read_text()
    assert "/home" not in text
    assert "set_working_directory" not in text


def test_prefect_yaml_and_alto_up_make_the_same_deployments() -> None:
    by_name = {deployment["name"]: deployment for deployment in deployments()}
    for name in ("schedule", "reconcile"):
        assert by_name[name]["work_pool"] == {"name": CONTROL_POOL, "job_variables": RUN_VARIABLES}
        assert by_name[name]["schedules"] == [{"interval": INTERVAL.total_seconds()}]
    runs, queue = by_name["schedule"]["triggers"]
    assert tuple(runs["expect"]) == RUN_EVENTS
    assert tuple(queue["expect"]) == QUEUE_EVENTS
    assert runs["match_related"]["prefect.resource.name"] == "tune queued"


@pytest.mark.slow
def test_deployments_can_be_made_twice(prefect_server: None) -> None:
    for _ in range(2):
        deploy_control()
        deploy_host("left")
    with get_client(sync_client=True) as client:
        made = {(d.name, d.work_pool_name, d.entrypoint) for d in client.read_deployments()}
        assert made >= {
            ("schedule", CONTROL_POOL, "flows.schedule.schedule"),
            ("reconcile", CONTROL_POOL, "flows.reconcile.reconcile"),
            ("left", "alto-left", "flows.tune.tune_queued"),
        }
