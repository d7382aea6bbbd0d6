"""Who types a command, as far as MLflow asks."""

from __future__ import annotations

from alto_core.ownership import Person
from alto_core.settings import Settings


def who(settings: Settings) -> Person:
    """Who is logged in to MLflow's server; nobody without one, which spares the seconds that importing MLflow takes.

    Raises:
        TrackingError: the server cannot be reached, or refuses the login.
    """
    if settings.has_embedded_mlflow:
        return Person()
    from alto_core.tracking import Tracker

    return Tracker(settings).person
