"""Challenger against champion on the same held-out rows; the better one serves."""

from __future__ import annotations

from prefect import task
from prefect.artifacts import create_markdown_artifact

from alto_core.promotion import promote as promote_challenger
from alto_core.settings import load_settings


@task(name="compare and promote", persist_result=False)
def promote(name: str, margin: float, accept_other_rows: bool) -> str:
    """Returns the decision as JSON. Never taken from a cache: what was decided yesterday says nothing about today."""
    settings = load_settings()
    decision = promote_challenger(name, settings, margin=margin, accept_other_rows=accept_other_rows)
    before = "none" if decision.champion_before is None else f"version {decision.champion_before}"
    create_markdown_artifact(
        key="promotion",
        description=f"Promotion of {name}",
        markdown=f"# {name}\n\nVersion **{decision.version}**: {decision.judgement.outcome}.\n\n"
        f"{decision.judgement.reason}.\n\nChampion before: {before}. Champion now: version **{decision.champion}**.",
    )
    return decision.as_json()
