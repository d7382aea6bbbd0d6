"""From challenger to champion, as a Prefect flow: what the deployment `promote` runs."""

# ruff: noqa: E402 - libraries are imported after the environment is prepared

from __future__ import annotations

from alto_core.settings import load_settings, prepare_environment

prepare_environment(load_settings())  # before torch, Prefect and MLflow read it

from prefect import flow

from tasks.promote import promote as compare_and_promote


@flow(name="promote", flow_run_name="promote {name}")
def promote(name: str, margin: float = 0.0, accept_other_rows: bool = False) -> str:
    """Let the challenger of a registered model serve if it beats the champion on the same held-out rows.

    Args:
        name: registered model.
        margin: by how much it must be better, in the units of the metric (or nats per token), beyond the 95 % interval.
        accept_other_rows: compare even where the champion was held out other rows.

    Returns:
        The decision with its numbers, as JSON.
    """
    return compare_and_promote(name, margin, accept_other_rows)
