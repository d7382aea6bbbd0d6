"""What is measured of a task's layers before its jobs can start: once per task, kept on disk.

Only where a job asks for it: a share of the layers, ranks that differ by layer, or a start from the task's inputs. The
file is named after all that the numbers depend on, so other tasks with the same rows and model read it as well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from alto_core import wording
from alto_core.budget import rows_of_step
from alto_core.data.rows import TokenRow
from alto_core.engine.adapter_plan import LayerMeasure, block_signals
from alto_core.engine.backbone import Backbone, load_backbone
from alto_core.engine.engine import Engine
from alto_core.engine.layer_probe import measure_layers
from alto_core.engine.objective import Objective
from alto_core.engine.target_modules import select_layers
from alto_core.references import fingerprint
from alto_core.store import EventDraft
from alto_core.whole_files import whole_file
from alto_core.workspace import Workspace

MEASURED_TOKENS = {"cpu": 1024, "cuda": 4096}
"""About so many of the first training rows; all in one pass."""


def measures_of(
    workspace: Workspace, objective: Objective | None, make_ready: Callable[[Engine], object]
) -> Mapping[str, LayerMeasure]:
    """Measurements by layer name; none where no job of the task needs any.

    Args:
        workspace: the task.
        objective: of its engines.
        make_ready: completes what the objective needs, in an engine that holds no job.

    Raises:
        TaskStopped: as the task was asked to, while the reference was measured that its objective needs.
        EngineError: the untuned model's gradients are not finite.
    """
    jobs = [job for job in workspace.jobs.values() if job.needs_measures]
    if not jobs:
        return {}
    names = sorted({name for job in jobs for name in job.target_modules})
    num_directions = max((job.trained_rows for job in jobs if job.init == "tlora"), default=0)
    backbone = load_backbone(workspace.task.model, workspace.device)
    file = workspace.settings.home / "layers" / f"{_key(workspace, backbone, names, num_directions)}.safetensors"
    known = _read(file)
    if known is not None:
        return known
    started, rows = time.monotonic(), _first_rows(workspace, MEASURED_TOKENS[backbone.device.type])
    with Engine(
        backbone,
        target_modules=names,
        num_slots=1,
        rank_rows=1,
        objective=objective,
        cuda_graph=False,
    ) as engine:
        make_ready(engine)
        measures = measure_layers(engine, backbone.model, names, rows, num_directions=num_directions)
    _write(file, measures)
    signals = block_signals(select_layers(backbone.layers, names), measures)
    largest = ", ".join(sorted(signals, key=lambda block: -signals[block])[:3])
    text = (
        f"measured {wording.plural(len(measures), 'layer')} on {wording.plural(len(rows), 'row')}, for all jobs, in "
        f"{time.monotonic() - started:.1f} s; largest gradients in {largest}"
    )
    workspace.store.append_events(workspace.task_id, [EventDraft(kind="layers", text=text)])
    return measures


def _first_rows(workspace: Workspace, max_tokens: int) -> list[TokenRow]:
    """The first rows that jobs train on, as many as there is room for, and at least one."""
    rows = workspace.data.train.rows
    order = rows_of_step(step=1, num_train_rows=len(rows), rows_per_update=len(rows), seed=workspace.task.data.seed)
    chosen: list[TokenRow] = []
    tokens = 0
    for i in order:
        tokens += len(rows[i].token_ids)
        if chosen and tokens > max_tokens:
            break
        chosen.append(rows[i])
    return chosen


def _key(workspace: Workspace, backbone: Backbone, names: list[str], num_directions: int) -> str:
    """Equal where the same measurements would come out again."""
    task = workspace.task
    parts = [
        workspace.data.digest,
        task.data.seed,
        *fingerprint(backbone),
        task.objective,
        None if task.dpo is None else task.dpo.model_dump(mode="json"),
        names,
        num_directions,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _write(file: Path, measures: Mapping[str, LayerMeasure]) -> None:
    numbers = {name: [measure.gradient, measure.sensitivity] for name, measure in measures.items()}
    tensors = {name: measure.directions_kI.contiguous() for name, measure in measures.items()}
    with whole_file(file) as partial:
        save_file(tensors, partial, metadata={"numbers": json.dumps(numbers)})


def _read(file: Path) -> dict[str, LayerMeasure] | None:
    """None where there is no such file; one that cannot be read counts as none, since all can be measured again."""
    try:
        with safe_open(file, "pt") as content:
            numbers = json.loads(content.metadata()["numbers"])
            # Copied out of the mapped file, which someone may cut.
            return {
                name: LayerMeasure(
                    gradient=gradient, sensitivity=sensitivity, directions_kI=content.get_tensor(name).clone()
                )
                for name, (gradient, sensitivity) in numbers.items()
            }
    except (OSError, SafetensorError, ValueError, LookupError, TypeError):
        return None
