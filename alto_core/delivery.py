"""A registered version as a folder to hand on: stock PEFT files, a card, and on request the merged model.

Before it is handed on it is checked: what servers refuse, whether it changes anything, and, where its base model is at
hand, whether it gives the losses that it had when it was registered.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from alto_core.config import ModelSection
from alto_core.data.rows import TokenRow
from alto_core.device import pick_device
from alto_core.engine.backbone import Backbone, load_backbone
from alto_core.engine.engine import UNTUNED, Engine
from alto_core.engine.export import CONFIG, WEIGHTS, adapter_job, pad_rank, read_tensors
from alto_core.engine.merging import write_merged
from alto_core.engine.serving import serving_problems, smallest_max_rank
from alto_core.errors import ModelError, StoreError, TrackingError
from alto_core.registration import held_out
from alto_core.settings import Settings
from alto_core.tracking import CHAMPION, RegisteredAdapter, Registry, Tracker
from alto_core.whole_files import whole_folder
from alto_core.workspace import Workspace

DEVIATION = 0.1
"""Share of what the adapter changes by which a loss may differ from registration: devices round differently."""


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """What was exported, and what to know about it."""

    adapter: RegisteredAdapter
    folder: Path
    merged_folder: Path | None
    lora_rank: int
    max_lora_rank: int | None
    """Lowest `--max-lora-rank` of vLLM that serves it."""
    warnings: tuple[str, ...]
    checks: tuple[str, ...]
    """What was looked at and found right."""


def export_version(
    reference: str, folder: Path, settings: Settings, *, merged: bool = False, padded: bool = False
) -> Delivery:
    """Write a registered version into a new folder.

    Args:
        reference: `NAME@ALIAS`, `NAME/VERSION`, or `NAME` for its champion.
        folder: where to; must not hold anything yet.
        settings: where MLflow and the tasks are.
        merged: also write `folder/merged`, the base model with the adapter added into its weights.
        padded: fill the rank up with zeros to the next one that vLLM has as a limit; outputs stay the same.

    Raises:
        TrackingError: there is no such version.
        ModelError: the folder is taken, or the base model is needed and cannot be loaded.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder}: got a file or a folder that holds something, expected a new or an empty one.")
    registry = Tracker(settings).registry
    adapter = resolve(registry, reference)
    base = _base_model(adapter, settings)
    with tempfile.TemporaryDirectory() as temporary:
        source = registry.download(adapter, Path(temporary))
        with whole_folder(folder.resolve()) as target:
            for name in (CONFIG, WEIGHTS):
                shutil.copyfile(source / name, target / name)
            _set_revision(target / CONFIG, adapter.tags.get("alto.base_revision"))
            if padded:
                _pad(target)
            warnings, checks = _examine(target, adapter, base, settings)
            if merged:
                write_merged(base, target, target / "merged")
            delivery = Delivery(
                adapter=adapter,
                folder=folder,
                merged_folder=folder / "merged" if merged else None,
                lora_rank=adapter_job(target).lora_rank,
                max_lora_rank=smallest_max_rank(adapter_job(target).lora_rank),
                warnings=tuple(warnings),
                checks=tuple(checks),
            )
            (target / "README.md").write_text(card(delivery), encoding="utf-8")
    return delivery


def resolve(registry: Registry, reference: str) -> RegisteredAdapter:
    """The version that a reference names.

    Raises:
        TrackingError: there is none, or the reference is no reference.
    """
    name, at, alias = reference.partition("@")
    if at:
        return registry.find(name, alias)
    name, slash, number = reference.partition("/")
    if not slash:
        return registry.find(name, CHAMPION)
    if not number.isdecimal():
        raise TrackingError(f"{reference!r}: expected NAME@ALIAS, NAME/VERSION or NAME, such as replies@champion")
    return registry.version(name, int(number))


def card(delivery: Delivery) -> str:
    """What stands beside the adapter for whoever gets it."""
    adapter, tags = delivery.adapter, delivery.adapter.tags
    base, revision = tags.get("alto.base_model", ""), tags.get("alto.base_revision")
    scores = {
        key.removeprefix("alto."): value
        for key, value in sorted(tags.items())
        if key.startswith(("alto.test_", "alto.untuned_test_", "alto.validation_"))
    }
    lines = [
        "---",
        f"base_model: {base}",
        "library_name: peft",
        "---",
        "",
        f"# {adapter.name}, version {adapter.version}",
        "",
        f"A LoRA adapter of rank {delivery.lora_rank} for {base}" + (f" at {revision}" if revision else "") + ".",
        f"Trained by task {tags.get('alto.task_id')}, job {tags.get('alto.job_id')}, with ALTO "
        f"{tags.get('alto.code_version')} on data {tags.get('alto.data_digest')}.",
        "",
        "| held-out score | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in scores.items()),
        "",
        "## Load it",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "<this folder>")',
        "```",
        "",
        "## Serve it",
        "",
    ]
    if delivery.max_lora_rank is not None:
        lines += [
            f"vLLM: `vllm serve {base} --enable-lora --max-lora-rank {delivery.max_lora_rank} "
            f"--lora-modules {adapter.name}=<this folder>`",
            "",
        ]
    if delivery.merged_folder is not None:
        lines += ["`merged/` is the base model with the adapter in its weights; it needs neither PEFT nor LoRA.", ""]
    lines += [f"- Warning: {warning}." for warning in delivery.warnings]
    lines += [f"- Checked: {check}." for check in delivery.checks]
    return "\n".join(lines) + "\n"


def _base_model(adapter: RegisteredAdapter, settings: Settings) -> ModelSection:
    """The model section of the version's task where that is in this home, else the name it was registered with."""
    workspace = Workspace(adapter.tags.get("alto.task_id", ""), settings)
    try:
        return workspace.task.model
    except StoreError:
        name = adapter.tags.get("alto.base_model") or "unknown"
        return ModelSection(name=name, revision=adapter.tags.get("alto.base_revision") or None)


def _set_revision(file: Path, revision: str | None) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**config, "revision": revision or None}, indent=2), encoding="utf-8")


def _pad(folder: Path) -> None:
    lora_rank = adapter_job(folder).lora_rank
    padded = smallest_max_rank(lora_rank)
    if padded is None:
        raise ModelError(f"rank {lora_rank}: got one above every limit of vLLM, expected at most 512 to pad it.")
    pad_rank(folder, padded)


def _examine(
    folder: Path, adapter: RegisteredAdapter, base: ModelSection, settings: Settings
) -> tuple[list[str], list[str]]:
    """Warnings, and what was found right."""
    tensors = read_tensors(folder)
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    warnings = list(serving_problems(config, tensors))
    if not any(bool(tensor.any()) for name, tensor in tensors.items() if ".lora_B." in name):
        return [*warnings, "it changes nothing: every lora_B is zero"], []
    checks = [] if warnings else ["its format is one that vLLM serves"]
    recorded = [float(loss) for loss in adapter.tags.get("alto.check_losses", "").split(",") if loss]
    try:
        rows = held_out(Workspace(adapter.tags.get("alto.task_id", ""), settings)).rows[: len(recorded)]
    except (StoreError, OSError):
        rows = ()
    try:
        backbone = load_backbone(base, pick_device(settings.device))
    except ModelError as error:
        return [*warnings, f"not tried on its base model, which is not at hand ({error})"], checks
    on, off = _losses(folder, backbone, rows)
    if on == off:
        warnings.append("it changes nothing: losses with and without it are equal")
    elif rows and max(abs(a - b) for a, b in zip(on, recorded, strict=True)) > DEVIATION * max(
        abs(a - b) for a, b in zip(off, recorded, strict=True)
    ):
        warnings.append(f"its losses on {len(rows)} held-out rows are {on}, at registration they were {recorded}")
    else:
        told = f", and gives the losses that it had at registration ({len(rows)} held-out rows)" if rows else ""
        checks.append(f"it changes what its base model says{told}")
    return warnings, checks


def _losses(
    folder: Path, backbone: Backbone, rows: tuple[TokenRow, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Losses of some rows, or of a made-up one, with the adapter and without."""
    rows = rows or (_made_up_row(),)
    job = adapter_job(folder)
    engine = Engine(backbone, target_modules=job.target_modules, num_slots=1, rank_rows=job.lora_rank, cuda_graph=False)
    with engine:
        engine.load_adapter(job, folder)
        losses = engine.evaluate([job.job_id, UNTUNED], rows, max_tokens=8192)
    return losses[job.job_id].loss_sums, losses[UNTUNED].loss_sums


def _made_up_row() -> TokenRow:
    token_ids = tuple(3 + 5 * i for i in range(12))
    return TokenRow(row_id=0, origin="made up", token_ids=token_ids, label_mask=(False,) + (True,) * 11)
