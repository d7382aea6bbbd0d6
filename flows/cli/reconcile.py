"""`alto reconcile`: find what died without a word, now."""

from __future__ import annotations

import dataclasses

import typer

from alto_core.settings import load_settings, prepare_environment
from flows.cli.output import dump, stdout_for


def run_reconcile(*, as_json: bool) -> None:
    """Take back from what is dead, set records to the truth, deliver what MLflow has not got, and print what was found.

    Without a Prefect server signs of life alone decide, and the embedded one is started only to be told of dead runs.
    """
    settings = load_settings()
    prepare_environment(settings)
    with stdout_for(as_json) as stream:
        if settings.prefect_api_url is None:
            from alto_core.cluster.dead_tasks import end_dead_tasks
            from alto_core.cluster.recovery import recover

            findings = (*recover(settings), *end_dead_tasks(settings))
            if any(finding.flow_run_id for finding in findings):
                from flows.reconcile import tell_prefect

                tell_prefect(findings)
        else:
            from flows.reconcile import sweep

            findings = sweep()
        from alto_core.cluster.leftovers import deliver_leftovers

        findings += deliver_leftovers(settings)
        if as_json:
            for finding in findings:
                print(dump({"event": "found", **dataclasses.asdict(finding)}), file=stream)
            return
        for finding in findings:
            typer.echo(finding.text, file=stream)
        if not findings:
            typer.echo("Nothing was dead, and nothing waited for MLflow.", file=stream)
