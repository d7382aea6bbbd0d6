"""`alto export`: a registered version as a folder to hand on."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from alto_core.loading import loading
from alto_core.settings import load_settings, prepare_environment
from flows.cli.output import busy, console_for, dump, stdout_for


def run_export(reference: str, folder: Path, *, merged: bool, padded: bool, as_json: bool) -> None:
    """Write the folder, and say what was checked and what to know before serving it."""
    settings = load_settings()
    prepare_environment(settings)
    with stdout_for(as_json) as stream:
        with busy("writing the adapter, and trying it on held-out rows"):
            with loading():  # here, since it imports torch and MLflow
                from alto_core.delivery import export_version

            delivery = export_version(reference, folder, settings, merged=merged, padded=padded)
        if as_json:
            content = {
                "event": "export",
                "name": delivery.adapter.name,
                "version": delivery.adapter.version,
                "folder": str(delivery.folder.resolve()),
                "merged_folder": str(delivery.merged_folder.resolve()) if delivery.merged_folder else None,
                "lora_rank": delivery.lora_rank,
                "max_lora_rank": delivery.max_lora_rank,
                "warnings": delivery.warnings,
                "checks": delivery.checks,
            }
            print(dump(content), file=stream)
            return
        console = console_for(stream)
        what = f"{delivery.adapter.name} version {delivery.adapter.version}"
        console.print(Text.assemble(what, " is in ", (str(delivery.folder), "bold")), soft_wrap=True)
        if delivery.merged_folder:
            console.print(Text(f"  merged model: {delivery.merged_folder}"), soft_wrap=True)
        if delivery.max_lora_rank:
            served = f"  rank {delivery.lora_rank}, served by vLLM with --max-lora-rank {delivery.max_lora_rank}"
            console.print(Text(served), soft_wrap=True)
        for check in delivery.checks:
            console.print(Text(f"  checked: {check}"), soft_wrap=True)
        for warning in delivery.warnings:
            console.print(Text(f"  warning: {warning}", style="yellow"), soft_wrap=True)
