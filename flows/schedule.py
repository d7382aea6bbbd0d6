"""The scheduling flow: take back what is dead, plan what waits, dispatch what starts now.

The queue is the truth. What triggers the flow only wakes it: it reads everything anew, and several of it at once, or
beside a waiting scheduler, cannot dispatch a task twice.
"""

# ruff: noqa: E402 - libraries are imported after the environment is prepared

from __future__ import annotations

from alto_core.settings import load_settings, prepare_environment

prepare_environment(load_settings())  # before Prefect reads it

from prefect import flow

from flows.reconcile import take_back
from tasks.dispatch import dispatch
from tasks.place import place


@flow(name="schedule", flow_run_name="schedule: {reason}")
def schedule(reason: str = "interval") -> list[str]:
    """Returns the ids of the flow runs that were asked for.

    Args:
        reason: what woke it, for the record of plans.
    """
    take_back()
    return [run_id for placement in place(reason) if (run_id := dispatch(placement)) is not None]


def schedule_here(reason: str) -> list[str]:
    """The same without a flow run, for a scheduler that waits in a process of its own: about a second faster."""
    return [run_id for placement in place.fn(reason) if (run_id := dispatch.fn(placement)) is not None]
