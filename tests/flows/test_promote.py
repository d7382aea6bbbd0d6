"""The flow `promote`, and the event that starts it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.deployment_triggers import DeploymentEventTrigger
from prefect.events.schemas.events import Event, Resource

from alto_core.engine.backbone import release_backbone

pytestmark = [pytest.mark.usefixtures("prefect_server"), pytest.mark.slow]
DEPLOYMENTS = yaml.safe_load((Path(__file__).resolve().parents[2] / "prefect.yaml").read_text())["deployments"]


async def _artifacts() -> list[Any]:
    async with get_client() as client:
        return list(await client.read_artifacts())


def test_the_flow_promotes_and_leaves_the_decision_as_an_artifact(
    home_with: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALTO_HOME", str(home_with(1, 40)))
    monkeypatch.setenv("ALTO_DEVICE", "cpu")
    from flows.promote import promote

    decision = json.loads(promote("model"))
    assert (decision["champion_before"], decision["champion"], decision["judgement"]["outcome"]) == (1, 2, "better")
    (artifact,) = [a for a in asyncio.run(_artifacts()) if a.key == "promotion"]
    assert "Champion before: version 1. Champion now: version **2**." in artifact.data
    release_backbone()


def test_a_new_challenger_starts_the_deployment_with_its_model() -> None:
    (deployment,) = [d for d in DEPLOYMENTS if d["name"] == "promote"]
    (content,) = deployment["triggers"]
    trigger = DeploymentEventTrigger.model_validate(content)
    event = Event(
        occurred=datetime.now(UTC),
        event="alto.challenger.registered",
        resource=Resource({"prefect.resource.id": "alto.model.replies", "alto.model.name": "replies"}),
    )
    assert event.event in trigger.expect
    assert event.resource.id.startswith(content["match"]["prefect.resource.id"].rstrip("*"))
    from prefect.server.utilities.user_templates import render_user_template_sync

    assert render_user_template_sync(content["parameters"]["name"], {"event": event}) == "replies"
